"""The shape of the code: layers, what an import costs, what a recipe's help costs.

Invariant: these rules are checked by machine, never by review. Run by `make test`.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
HEAVY = ("vllm", "torch", "ray", "transformers")
HELP_LIMIT_S = 3.0

pytestmark = pytest.mark.slow  # a fresh process for each


def recipe_modules() -> list[str]:
    """Modules of recipes/ that are programs."""
    return [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in sorted((REPOSITORY / "recipes").rglob("*.py"))
        if '__name__ == "__main__"' in path.read_text()
    ]


def modules_below(*folders: str) -> list[str]:
    """Every module of these folders, dotted."""
    paths = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    return [".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )


def loaded_of(heavy: tuple[str, ...], modules: list[str]) -> dict[str, list[str]]:
    """Which of the heavy packages each module loads; modules are imported in turn, so the first guilty one is named."""
    code = (
        "import importlib, json, sys\n"
        f"heavy, found = set({heavy!r}), {{}}\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        "    loaded = heavy & sys.modules.keys()\n"
        "    heavy -= loaded\n"
        "    if loaded: found[module] = sorted(loaded)\n"
        "print(json.dumps(found))"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_layer_contracts_are_kept() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_trajectories_and_envs_load_no_ray_torch_vllm_or_transformers() -> None:
    assert loaded_of(HEAVY, modules_below("trajectories", "envs", "curation")) == {}


def test_learners_load_no_ray_or_vllm() -> None:
    assert loaded_of(("ray", "vllm"), modules_below("learners")) == {}


def test_recipes_load_no_torch_vllm_or_transformers() -> None:
    recipes = recipe_modules()
    assert recipes
    assert loaded_of(("vllm", "torch", "transformers"), recipes) == {}


def test_importing_the_recipes_starts_no_ray() -> None:
    done = run_python(
        "-c", "; ".join(f"import {module}" for module in recipe_modules()) + "; import ray; print(ray.is_initialized())"
    )
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


@pytest.mark.parametrize("recipe", recipe_modules())
def test_help_answers_in_time(recipe: str) -> None:
    """In processor time: on an idle machine the clock shows the same, on a busy one it says nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_python("-m", recipe, "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert f"python -m {recipe}" in done.stdout
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < HELP_LIMIT_S, f"{recipe} --help took {seconds:.1f} s"


def test_an_unknown_flag_is_refused_before_work_starts() -> None:
    done = run_python("-m", "recipes.harvest", "--no-such-flag", "1")
    assert done.returncode == 2
    assert "no-such-flag" in done.stdout + done.stderr
