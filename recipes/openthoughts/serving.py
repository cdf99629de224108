"""Serving of the OpenThoughts-Agent models: the teacher that is harvested, and the policy that is trained.

Invariant: sizes are the published ones (arXiv 2606.24855 and the teacher's published serving config); the model
directory is given by the recipe that takes these. Used by recipes on the cluster; tested against vLLM's parser.
"""

from actors.inference_config import DType, InferencePoolConfig, ServerConfig
from envs.sampler import SamplingParams

TEACHER = InferencePoolConfig(
    server=ServerConfig(
        max_model_len=131_072,
        max_num_seqs=50,
        tensor_parallel_size=4,
        data_parallel_size=4,
        expert_parallel=True,
        num_gpus=16,
        enforce_eager=False,
        engine_args={"kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.92},
    ),
    start_timeout_s=3600.0,
    request_timeout_s=1800.0,
)
"""GLM-4.7-AWQ as one engine on four nodes of four GPUs: tensor parallel within a node, experts spread over all 16."""

TEACHER_SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=16_384)
"""Harvested, not trained on by reinforcement, so the distribution may be cut."""

POLICY = InferencePoolConfig(
    server=ServerConfig(
        dtype=DType.BFLOAT16,
        max_model_len=32_768,
        max_num_seqs=64,
        num_gpus=1,
        enforce_eager=False,
        engine_args={"gpu_memory_utilization": 0.9},
    ),
    num_servers=16,
    start_timeout_s=1800.0,
    request_timeout_s=1800.0,
)
"""Qwen3-8B on 16 servers of one GPU each."""
