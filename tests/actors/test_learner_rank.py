"""A learner rank outside of Ray."""

from pathlib import Path

import torch

from actors.inference_config import DType
from actors.learner_rank import LearnerRank
from actors.weight_stage import read_stage
from learners.config import LearnerConfig
from learners.learner import Learner
from tests.actors.tiny_qwen3 import save_tiny_qwen3
from trajectories.schema import PolicyVersion

V3 = PolicyVersion(lineage=0, n=3)


def test_weights_travel_as_wide_as_the_servers_hold_them(tmp_path: Path):
    rank = LearnerRank(LearnerConfig(), tmp_path, tmp_path, 0, 1, 1)
    rank._learner = Learner(LearnerConfig(), model=save_tiny_qwen3(tmp_path / "model"))
    weights = dict(rank._learner.export_weights())
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        manifest = rank.stage_weights(tmp_path / dtype, V3, dtype)
        assert manifest is not None
        staged = {tensor.name: value for tensor, value in read_stage(manifest)}
        held = getattr(torch, dtype.value)
        assert staged.keys() == weights.keys()
        assert all(torch.equal(value, weights[name].to(held)) for name, value in staged.items())
        assert manifest.num_bytes == sum(weight.numel() for weight in weights.values()) * held.itemsize
