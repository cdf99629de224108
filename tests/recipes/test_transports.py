"""Transports, adapters and turns that a run may ask for: what cannot be is refused in one line, the rest agrees."""

from typing import Any

import pytest

from actors.cluster import Resources
from actors.inference_config import InferencePoolConfig, ServerConfig, Transport
from actors.learner_group import LearnerGroupConfig
from actors.sync_config import SyncConfig
from learners.config import LearnerConfig, LoraConfig
from recipes import rloo, transports
from recipes.policies import PolicyConfig


def config_of(
    transport: str = "files", *, gpus: int = 0, learner_gpus: int = 0, lora: int = 0, servers: int = 1, **config: Any
) -> rloo.Config:
    server = ServerConfig(num_gpus=gpus, colocated=config.pop("colocated", False))
    return rloo.Config(
        sync=SyncConfig(transport=Transport(transport)),
        policy=PolicyConfig(pool=InferencePoolConfig(server=server, num_servers=servers)),
        learner=LearnerConfig(lora=LoraConfig(rank=lora)),
        learners=LearnerGroupConfig(resources=Resources(num_gpus=learner_gpus)),
        **config,
    )


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"transport": "nccl"}, "goes from GPU to GPU, and the servers have none .* use files or object_store"),
        ({"transport": "ipc"}, "goes from GPU to GPU"),
        ({"transport": "sharded_rdt"}, "goes from GPU to GPU"),
        ({"transport": "nccl", "gpus": 1}, "must both have GPUs"),
        ({"transport": "nccl", "gpus": 1, "learner_gpus": 1, "lora": 8}, "adapters are small .* use files"),
        ({"transport": "ipc", "gpus": 1, "learner_gpus": 1}, "set policy.server.colocated, or use nccl"),
        (
            {"transport": "nccl", "gpus": 1, "learner_gpus": 1, "colocated": True, "max_staleness": 0},
            "colocated shares them; use ipc",
        ),
        ({"colocated": True}, "set max_staleness 0, got 1"),
        (
            {"colocated": True, "max_staleness": 0, "gpus": 1, "learner_gpus": 1, "servers": 2},
            "policy.num_servers=2 and learner.num_ranks=1",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config_of(**asked)


def test_sharded_rdt_without_its_package_is_refused() -> None:
    with pytest.raises(ValueError, match="pip install nixl, or use nccl"):
        transports.require_packages(Transport.SHARDED_RDT)


def test_servers_are_told_of_the_learners_adapters_and_of_the_transport() -> None:
    served = transports.serving(config_of(lora=24)).server
    assert (served.lora_rank, served.lora_targets, served.transport) == (24, LoraConfig().targets, Transport.FILES)
    whole = transports.serving(config_of("nccl", gpus=1, learner_gpus=1)).server
    assert (whole.lora_rank, whole.lora_targets, whole.transport) == (0, (), Transport.NCCL)


def test_an_evaluations_servers_are_staged_for_and_never_sleep() -> None:
    config = config_of("ipc", gpus=1, learner_gpus=1, colocated=True, max_staleness=0)
    server = transports.serving_evaluation(config).server
    assert (server.colocated, server.transport) == (False, Transport.OBJECT_STORE)
    assert transports.evaluation_sync(config).transport is Transport.OBJECT_STORE
