"""Two actors that share a GPU are on the same one, and pairs on different ones; Ray counts GPUs that are not there."""

import os

import pytest
import ray

from actors.placement import SHARED_GPU, shared_gpus


class Holder:
    """Tells which GPU Ray gave it."""

    def gpu(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.ray
@pytest.mark.exhaustive
async def test_pairs_share_a_gpu_each() -> None:
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=80 << 20)
    try:
        async with shared_gpus(2, num_cpus=0, what="two pairs", deadline_s=30) as places:
            pairs = [
                ray.remote(Holder).options(num_cpus=0, num_gpus=SHARED_GPU, scheduling_strategy=place).remote()
                for place in (*places, *places)
            ]
            gpus = [await actor.gpu.remote() for actor in pairs]
    finally:
        ray.shutdown()
    assert gpus[:2] == gpus[2:] and sorted(gpus[:2]) == ["0", "1"]
