"""What holds for every test: properties are never judged by the time an example takes."""

from hypothesis import settings

settings.register_profile("thresher", deadline=None)
settings.load_profile("thresher")
