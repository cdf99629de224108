"""Policies by name: a tiny one made on the spot, SmolLM2 from its package, or any Hugging Face directory.

Invariant: a name resolves to a directory that transformers and vLLM load, or to one clear error, before work starts.
Called by every recipe that serves or trains a policy.
"""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from actors.inference_config import InferencePoolConfig

_REPOSITORY = Path(__file__).resolve().parent.parent


def cache_directory() -> Path:
    """Where made things are kept between runs: $THRESHER_CACHE, or .cache in the working directory."""
    return Path(os.environ.get("THRESHER_CACHE", ".cache")).absolute()


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Which policy, and how it is served."""

    model: Annotated[str, tyro.conf.arg(aliases=["--policy"])] = "tiny"
    """tiny, smollm2, or a Hugging Face model directory."""
    pool: Annotated[InferencePoolConfig, tyro.conf.arg(name="")] = field(default_factory=InferencePoolConfig)


def resolve_policy(name: str, *, seed: int = 0) -> Path:
    """The model directory of `name`; makes it first where it can be made."""
    match name:
        case "tiny":
            return _tiny(seed)
        case "smollm2":
            from learners.models import load_smollm2

            return load_smollm2(cache_directory() / "policies" / "smollm2")
    path = Path(name).absolute()
    if not (path / "config.json").is_file():
        raise ValueError(
            f"no policy {name!r}: it is neither 'tiny' nor 'smollm2' nor a directory with a config.json; "
            "give the directory that a recipe saved (runs/.../model) or one in Hugging Face form"
        )
    return path


def _tiny(seed: int) -> Path:
    """The untrained tiny policy; made again whenever what makes it has changed."""
    sources = ("learners/models.py", "envs/tasksets/shell.py", "envs/tasksets/shell_families.py")
    digest = hashlib.sha256(b"".join((_REPOSITORY / source).read_bytes() for source in sources)).hexdigest()[:12]
    directory = cache_directory() / "policies" / f"tiny-{seed}-{digest}"
    if not (directory / "config.json").is_file():
        from envs.tasksets.shell import corpus
        from learners.models import make_tiny_model

        make_tiny_model(directory, corpus(), seed=seed)
    return directory
