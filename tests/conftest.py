"""What holds for every test: properties are never judged by the time an example takes, and torch computes exactly."""

from hypothesis import settings

from learners.vector_math import settle_vector_math

settings.register_profile("thresher", deadline=None)
settings.load_profile("thresher")

settle_vector_math()
