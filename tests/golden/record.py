"""Records the golden curves anew: `python -m tests.golden.record`, with --rollouts the Groups of RLOO too.

Only for a change that is meant to change the numbers; the diff of the JSON files then belongs to that change.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from envs.renderer import ChatRenderer, load_renderer
from tests.golden.curves import CONVERSATIONS, HERE, ROLLOUTS, golden_model, one_thread, rloo_curve, sft_curve
from tests.learners.reference import PlainLearner
from trajectories.conversations import read_conversations
from trajectories.schema import Group, Outcome, PolicyVersion, Trajectory, Turn, TurnTokens, VersionSpan
from trajectories.store import StoreWriter

NUM_GROUPS, GROUP_SIZE, NUM_TURNS, TURN_TOKENS = 3, 4, 2, 10


def main() -> None:
    """Writes sft.json and rloo.json beside this file."""
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        model = golden_model(Path(scratch) / "model")
        if "--rollouts" in sys.argv or not ROLLOUTS.exists():
            record_rollouts(model)
        for name, curve in {"sft": sft_curve(model, Path(scratch) / "store"), "rloo": rloo_curve(model)}.items():
            (HERE / f"{name}.json").write_text(json.dumps(curve, indent=1) + "\n")
            print(f"{name}: loss {curve['train/loss'][0]:.6f} -> {curve['train/loss'][-1]:.6f}")


def record_rollouts(model: Path) -> None:
    """Groups sampled at temperature 1; rewards alternate, and one member of the first Group is lost."""
    shutil.rmtree(ROLLOUTS, ignore_errors=True)
    plain, renderer = PlainLearner(model, lr=1.0), load_renderer(model)
    generator = torch.Generator().manual_seed(0)
    rows = list(read_conversations(CONVERSATIONS))
    with StoreWriter(ROLLOUTS, "golden") as writer:
        for index in range(NUM_GROUPS):
            prompt = rows[index].messages[0]["content"]
            members = tuple(
                _trajectory(plain, renderer, generator, prompt, f"g{index}", member) for member in range(GROUP_SIZE)
            )
            writer.append(Group(id=f"g{index}", task_id=f"t{index}", trajectories=members))


def _trajectory(
    plain: PlainLearner, renderer: ChatRenderer, generator: torch.Generator, prompt: str, group_id: str, member: int
) -> Trajectory:
    turns: list[Turn] = []
    context: tuple[int, ...] = ()
    new_ids = renderer.first(prompt)
    for _ in range(NUM_TURNS):
        sampled, logprobs = _sample(plain, (*context, *new_ids), generator)
        spans = (VersionSpan(version=PolicyVersion(lineage=0, n=0), num_tokens=len(sampled)),)
        tokens = TurnTokens(
            prefix_len=len(context), new_ids=new_ids, sampled_ids=sampled, logprobs=logprobs, spans=spans
        )
        turns.append(Turn(reply=renderer.decode(sampled), observation="$", finish_reason="length", tokens=tokens))
        context = (*context, *new_ids, *sampled)
        new_ids = renderer.next(context[: -len(sampled)], sampled, "$")[1]
    is_lost = (group_id, member) == ("g0", 3)
    return Trajectory(
        id=f"{group_id}-{member}",
        task_id=f"t{group_id[1:]}",
        group_id=group_id,
        member=member,
        prompt=prompt,
        turns=tuple(turns),
        outcome=Outcome.SANDBOX_ERROR if is_lost else Outcome.COMPLETED,
        reward=None if is_lost else float(member % 2),
    )


@torch.no_grad()
def _sample(
    plain: PlainLearner, prompt: tuple[int, ...], generator: torch.Generator
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ids, logprobs = list(prompt), []
    for _ in range(TURN_TOKENS):
        log_probs_V = plain.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        chosen = int(torch.multinomial(log_probs_V.exp(), 1, generator=generator))
        ids.append(chosen)
        logprobs.append(float(log_probs_V[chosen]))
    return tuple(ids[len(prompt) :]), tuple(logprobs)


if __name__ == "__main__":
    main()
