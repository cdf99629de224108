"""The Verifier: runs a Task's hidden tests in its Sandbox and reads the reward they wrote.

Invariant: a Verdict comes only from a reward file that this run of tests/test.sh wrote, after every process of the
agent was ended. Called by envs/steps.py.
"""

import json
import math
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from envs.errors import SandboxDied, VerifierError
from envs.sandbox import ExecResult, Sandbox
from envs.task import Task
from envs.templating import resolve_variables
from envs.users import as_user

EVIDENCE_CHARS = 4000
"""Evidence keeps this much of the end of the test output."""

# One exec does all, because a rollout pays for each: clear what the agent may have left in the verifier's places, run
# the tests, print the reward file's name and text and the end of the test output. The uploaded tests wait under a name
# the agent could not know. `cd` is here and not in the exec: the agent may have removed its own working directory.
# Where bash alone can do it no program is started (measured: 5 programs less are 3 to 10 ms less a rollout).
# 4 bytes is the longest character of UTF-8, so the tail holds EVIDENCE_CHARS of them.
_SCRIPT = """\
shopt -s nullglob dotglob
left=(/logs/verifier/*)
if [[ -e /tests || -L /tests || -L /logs/verifier || ! -d /logs/verifier || ${{#left[@]}} -gt 0 ]]; then
    rm -rf /tests /logs/verifier && mkdir -p -m 777 /logs/verifier || exit 1
fi
mv {staged} /tests || exit 1
cd {workdir} 2>/dev/null
{run} >/logs/verifier/test-stdout.txt 2>&1 </dev/null
LC_ALL=C
for name in reward.json reward.txt; do
    [[ -f /logs/verifier/$name ]] || continue
    text=; IFS= read -r -N {max_reward_bytes} text </logs/verifier/$name
    printf '%s\\n%s' $name "$text"
    break
done
printf '\\0'
text=; IFS= read -r -N {max_tail_bytes} text </logs/verifier/test-stdout.txt
if (( ${{#text}} < {max_tail_bytes} )); then
    printf %s "$text"
else
    tail -c {max_tail_bytes} /logs/verifier/test-stdout.txt
fi
exit 0
"""
_MAX_REWARD_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests found."""

    reward: float
    """Finite; 0 or 1 in the task sets of this project."""
    evidence: str
    """The last EVIDENCE_CHARS characters that the tests printed."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """All that reward.json holds, the reward among it; from reward.txt the reward alone, as "reward"."""


async def verify(task: Task, sandbox: Sandbox, *, timeout_s: float, tests: Sequence[Path] | None = None) -> Verdict:
    """The Verdict on the Sandbox as the agent left it; the exit status of test.sh means nothing.

    `tests`: directories that are laid over each other as /tests; None: the Task's own.

    Raises VerifierError when no valid reward came within `timeout_s`, and SandboxDied when the Sandbox was left in a
    state in which tests cannot even be put in place (a policy must not escape its reward by wrecking the box).
    """
    await sandbox.kill_all()
    staged = f"/.tests-{secrets.token_hex(8)}"
    for directory in tests if tests is not None else (task.path / "tests",):
        await sandbox.upload_dir(directory, staged)
    command = _SCRIPT.format(
        staged=staged,
        workdir=shlex.quote(sandbox.workdir),
        run=_run_command(task),
        max_reward_bytes=_MAX_REWARD_BYTES,
        max_tail_bytes=4 * EVIDENCE_CHARS,
    )
    result = await sandbox.exec(command, timeout_s=timeout_s, env=resolve_variables(task.verifier.env), cwd="/")
    if result.exit_code == 124:
        raise VerifierError(f"tests did not end within {timeout_s:g} s")
    if result.exit_code != 0:
        raise SandboxDied(f"tests could not be put in place: {_text(result.stderr)[-500:].strip() or result.exit_code}")
    return _verdict(result)


def _run_command(task: Task) -> str:
    run = "bash /tests/test.sh"
    if task.verifier.user is None:
        return run
    return f"chmod 777 /logs/verifier\n(\n{as_user(run, task.verifier.user)})"


def _verdict(result: ExecResult) -> Verdict:
    head, _, tail = result.stdout.partition(b"\0")
    evidence = _text(tail)[-EVIDENCE_CHARS:]
    name, _, text = _text(head).partition("\n")
    if not name:
        raise VerifierError(f"tests wrote no reward file; they printed: {evidence[-500:].strip() or 'nothing'}")
    rewards = _parse_json(text) if name == "reward.json" else {"reward": _parse_number(text)}
    for key, reward in rewards.items():
        if not math.isfinite(reward):
            raise VerifierError(f"{name} is not finite: {key} is {reward}")
    if "reward" not in rewards and len(rewards) != 1:
        raise VerifierError(f"reward.json has no key 'reward' among {sorted(rewards)}")
    reward = rewards["reward"] if "reward" in rewards else next(iter(rewards.values()))
    return Verdict(reward=reward, evidence=evidence, rewards=rewards)


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise VerifierError(f"reward.txt holds no number: {text.strip()[:80]!r}") from None


def _parse_json(text: str) -> dict[str, float]:
    """The object's values, all of which must be numbers."""
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise VerifierError(f"reward.json is not JSON: {text.strip()[:80]!r}") from None
    if not isinstance(content, dict):
        raise VerifierError(f"reward.json is not an object: {text.strip()[:80]!r}")
    return {key: _number(value) for key, value in cast(dict[str, Any], content).items()}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise VerifierError(f"reward.json holds no number: {value!r}"[:200])
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
