"""The two policies that benchmarks serve: the untrained tiny one, and SmolLM2 from its package.

Invariant: a directory is made once and then reused. Called by benchmarks that need an engine or a learner.
"""

from pathlib import Path

from actors.inference_config import DType, ServerConfig

CACHE = Path(".cache/benchmarks")
SERVERS = {
    "tiny": ServerConfig(),
    "smollm2": ServerConfig(dtype=DType.BFLOAT16, max_num_seqs=64, kv_cache_gb=1.0, threads=2),
}
"""How each is served; engines share the cores with everything else."""


def policy_directory(name: str) -> Path:
    """A Hugging Face directory of "tiny" or "smollm2"; ValueError for another name."""
    from learners.models import load_smollm2, make_tiny_model

    directory = (CACHE / name).absolute()
    match name:
        case "tiny":
            from envs.tasksets.shell import corpus

            return directory if (directory / "config.json").is_file() else make_tiny_model(directory, corpus())
        case "smollm2":
            return load_smollm2(directory)
    raise ValueError(f"no policy {name!r} to measure: take tiny or smollm2")
