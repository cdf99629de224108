"""A short selection of `python -m benchmarks.sandbox_kills`: nothing is left after kills at random moments."""

import random

import pytest

from benchmarks.sandbox_kills import kill_at_random
from envs.providers import ProviderName
from tests.envs.local.boxes import IS_ROOT

pytestmark = [pytest.mark.sandbox, pytest.mark.skipif(not IS_ROOT, reason="looks into cgroups of its own")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("provider", [ProviderName.LOCAL, ProviderName.DAYTONA])
async def test_nothing_is_left_after_kills_and_a_sweep(provider: ProviderName) -> None:
    figures = await kill_at_random(provider, kills=6, rng=random.Random(1), deadline_s=300)
    assert {name: count for name, count in figures.items() if "_left_" in name and count} == {}
    assert sum(count for name, count in figures.items() if "_kills_of_" in name) == 6
