"""The fake keeps the contract that the real pool keeps."""

from collections.abc import Sequence

import pytest

from envs.sampler import Completion, SamplingParams
from tests.contracts.sampler import check_sampler
from tests.fakes.sampler import FakeSampler, Reply, echo
from trajectories.schema import PolicyVersion, VersionSpan


@pytest.mark.parametrize("reply", [echo(5, 9), lambda ids: [1] * 100, lambda ids: [3, 9, 4]])
@pytest.mark.parametrize("tokens_per_version", [None, 2])
async def test_fake_sampler_keeps_the_contract(reply: Reply, tokens_per_version: int | None) -> None:
    sampler = FakeSampler(reply, tokens_per_version=tokens_per_version)
    await check_sampler(sampler, [1, 2, 3, 4, 5, 6], stop_ids=[9, 8], vocab_size=10)


async def test_the_contract_catches_a_sampler_that_ignores_stop_ids() -> None:
    class Deaf(FakeSampler):
        async def sample(
            self, prompt_ids: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int], key: str
        ) -> Completion:
            return await super().sample(prompt_ids, params, stop_ids=(), key=key)

    with pytest.raises(AssertionError, match="goes on after a stop id"):
        await check_sampler(Deaf(lambda ids: [3, 9] * 100), [1], stop_ids=[9], vocab_size=10)


async def test_fake_sampler_changes_its_version_in_mid_reply() -> None:
    sampler = FakeSampler(lambda ids: [1, 2, 3, 4, 9], tokens_per_version=3)
    completion = await sampler.sample([0], SamplingParams(), stop_ids=[9], key="t")
    assert completion.spans == (
        VersionSpan(version=PolicyVersion(lineage=0, n=0), num_tokens=3),
        VersionSpan(version=PolicyVersion(lineage=0, n=1), num_tokens=2),
    )
