"""ATIF: a Trajectory as the JSON that Harbor and its tools read (schema ATIF-v1.8).

Invariant: the steps are the prompt and one agent step for each Turn, in order, with the exact tokens where the
Trajectory has them; a message is the raw reply, nothing parsed out of it. Called by trajectories/harbor_job.py.
"""

import math
from typing import Any

from trajectories.schema import Trajectory, Turn

SCHEMA_VERSION = "ATIF-v1.8"
AGENT_VERSION = "thresher"


def to_atif(trajectory: Trajectory) -> dict[str, Any]:
    """The Trajectory as an ATIF object, ready for JSON; times are durations (in `extra`), as we keep no clock times.

    `metrics.prompt_token_ids` of a step is its full prompt, so the object grows with the square of the Turns.
    """
    contexts = _prompts(trajectory)
    steps = [{"step_id": 1, "source": "user", "message": trajectory.prompt}]
    for number, (turn, prompt) in enumerate(zip(trajectory.turns, contexts, strict=True), start=2):
        steps.append(_step(number, turn, prompt, is_last=number == len(trajectory.turns) + 1))
    agent: dict[str, Any] = {"name": harness_of(trajectory), "version": AGENT_VERSION}
    if model := model_of(trajectory):
        agent["model_name"] = model
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": trajectory.id,
        "trajectory_id": trajectory.id,
        "agent": agent,
        "steps": steps,
        "final_metrics": {**_totals(trajectory, contexts), "total_steps": len(steps)},
        "extra": {
            "task_id": trajectory.task_id,
            "group_id": trajectory.group_id,
            "member": trajectory.member,
            "outcome": trajectory.outcome.value,
            "reward": trajectory.reward,
            "error": trajectory.error,
            "timings_s": dict(trajectory.timings_s),
        },
    }


def harness_of(trajectory: Trajectory) -> str:
    """The harness's name, as Harbor's agent name."""
    return trajectory.provenance.get("harness") or "terminus-2"


def model_of(trajectory: Trajectory) -> str:
    """The policy's name; "" when it is not recorded."""
    return trajectory.provenance.get("model") or trajectory.provenance.get("sampler", "")


def num_tokens(trajectory: Trajectory) -> tuple[int, int] | None:
    """Prompt tokens over all Turns, sampled tokens; None when a Turn has no tokens."""
    if not trajectory.turns or any(turn.tokens is None for turn in trajectory.turns):
        return None
    totals = _totals(trajectory, _prompts(trajectory))
    return totals["total_prompt_tokens"], totals["total_completion_tokens"]


def _prompts(trajectory: Trajectory) -> list[list[int] | None]:
    """The full prompt of each Turn, from the kept prefixes; None for a Turn without tokens."""
    prompts: list[list[int] | None] = []
    context: list[int] = []
    for turn in trajectory.turns:
        if turn.tokens is None:
            prompts.append(None)
            continue
        prompt = [*context[: turn.tokens.prefix_len], *turn.tokens.new_ids]
        prompts.append(prompt)
        context = [*prompt, *turn.tokens.sampled_ids]
    return prompts


def _step(number: int, turn: Turn, prompt: list[int] | None, *, is_last: bool) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "finish_reason": turn.finish_reason,
        "sample_s": turn.sample_s,
        "execute_s": turn.execute_s,
    }
    step: dict[str, Any] = {"step_id": number, "source": "agent", "message": turn.reply, "extra": extra}
    if turn.observation or not is_last:
        step["observation"] = {"results": [{"content": turn.observation}]}
    if turn.tokens is None or prompt is None:
        return step
    metrics: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(turn.tokens.sampled_ids),
        "prompt_token_ids": prompt,
        "completion_token_ids": list(turn.tokens.sampled_ids),
    }
    if all(map(math.isfinite, turn.tokens.logprobs)):
        metrics["logprobs"] = list(turn.tokens.logprobs)
    else:  # JSON has no infinity, and a made-up number would be trained on
        extra["logprobs"] = "left out: not finite"
    step |= {"llm_call_count": 1, "metrics": metrics}
    extra["versions"] = [
        {"lineage": span.version.lineage, "n": span.version.n, "num_tokens": span.num_tokens}
        for span in turn.tokens.spans
    ]
    return step


def _totals(trajectory: Trajectory, prompts: list[list[int] | None]) -> dict[str, int]:
    sampled = [len(turn.tokens.sampled_ids) for turn in trajectory.turns if turn.tokens is not None]
    return {
        "total_prompt_tokens": sum(len(prompt) for prompt in prompts if prompt is not None),
        "total_completion_tokens": sum(sampled),
    }
