"""Demonstrations: what SFT trains on, rendered by the policy's chat template into a store of Samples.

Invariant: once rendered, a run's demonstrations and their order never change, whatever happens to their sources; a
restart reads them back. Called by recipes/sft.py.
"""

import asyncio
import json
import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from envs.renderer import ChatRenderer
from envs.transcript import render_transcript
from learners.plan import SizedSample
from trajectories.conversations import read_conversations
from trajectories.dialogues import Dialogue, dialogues
from trajectories.handle import Location
from trajectories.samples import Sample, conversation_sample
from trajectories.store import StoreWriter, scan
from trajectories.validity import member_reward

logger = logging.getLogger(__name__)

MANIFEST = "demonstrations.json"


class Overlong(StrEnum):
    """What becomes of a conversation that is longer than `learner.max_tokens`."""

    REFUSE = "refuse"
    """The run ends before it starts."""
    DROP = "drop"
    CUT = "cut"
    """Its first tokens are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which conversations are trained on."""

    min_reward: float | None
    """Those with at least this reward; None keeps every valid one."""
    min_turns: int
    """Those with at least so many replies; of a store's, the replies of the whole Trajectory count."""
    limit: int | None
    """At most so many, after shuffling."""
    shuffle_seed: int | None
    """None keeps the order of the sources."""
    max_tokens: int
    overlong: Overlong


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A rendered conversation in the run's store of Samples."""

    sample: SizedSample
    family: str
    """Family of its Task; "" where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """All of a run, in the order of training."""

    items: Sequence[Demonstration]
    counts: Mapping[str, int]
    """Conversations that were read, kept, cut, and left out for each reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A conversation before it is rendered."""

    dialogue: Dialogue
    reward: float | None
    is_excluded: bool
    """Its Outcome counts in no sum."""
    num_turns: int
    """Of the whole Trajectory."""
    family: str
    name: str


async def load_demonstrations(
    sources: Sequence[Path], selection: Selection, renderer: ChatRenderer, directory: Path, advance: Callable[[], None]
) -> Demonstrations:
    """Those that an earlier start of the run rendered into `directory`, or else rendered now.

    A source is a run directory with a store, or what `read_conversations` reads. ValueError when none passes the
    selection, and for a row or template that cannot be trained on.
    """
    manifest = directory / MANIFEST
    if manifest.exists():
        return _read_manifest(manifest)
    shutil.rmtree(directory, ignore_errors=True)  # of a start that did not get to the end of it
    rendered, counts = await _render_all(sources, selection, renderer, directory, advance)
    if not rendered:
        names = ", ".join(map(str, sources))
        raise ValueError(
            f"no conversation in {names} passes the filters ({dict(counts)}); harvest first or lower --min-reward"
        )
    if selection.shuffle_seed is not None:
        random.Random(selection.shuffle_seed).shuffle(rendered)
    demonstrations = Demonstrations(items=rendered[: selection.limit], counts=dict(counts))
    _write_manifest(manifest, demonstrations)
    logger.info("demonstrations=%d of %s", len(demonstrations.items), dict(counts))
    return demonstrations


async def _render_all(
    sources: Sequence[Path], selection: Selection, renderer: ChatRenderer, directory: Path, advance: Callable[[], None]
) -> tuple[list[Demonstration], Counter[str]]:
    rendered: list[Demonstration] = []
    counts: Counter[str] = Counter()
    with StoreWriter(directory, "sft") as writer:
        for path in sources:
            for source in _conversations(path):
                await asyncio.sleep(0)  # lets an interruption in
                advance()
                sample, fate = _render(source, selection, renderer)
                counts["read"] += 1
                counts[fate] += 1
                if sample is not None:
                    sized = SizedSample(
                        location=writer.append_sample(sample),
                        num_tokens=len(sample.ids),
                        num_trained=int(sample.mask.sum()),
                    )
                    rendered.append(Demonstration(sample=sized, family=source.family))
    return rendered, counts


def _conversations(path: Path) -> Iterator[_Source]:
    if (path / "store").is_dir():
        for _, group in scan(path / "store"):
            for trajectory in group.trajectories:
                reward = member_reward(trajectory)
                for told in dialogues(trajectory) or [Dialogue(messages=())]:
                    yield _Source(
                        dialogue=told,
                        reward=reward,
                        is_excluded=reward is None,
                        num_turns=len(trajectory.turns),
                        family=trajectory.provenance.get("family", ""),
                        name=f"{path} {trajectory.id}",
                    )
        return
    for row in read_conversations(path):
        yield _Source(
            dialogue=Dialogue(messages=row.messages),
            reward=row.reward,
            is_excluded=False,
            num_turns=row.num_turns,
            family="",
            name=row.source,
        )


def _render(source: _Source, selection: Selection, renderer: ChatRenderer) -> tuple[Sample | None, str]:
    """The Sample, and what became of the conversation."""
    if source.is_excluded:
        return None, "excluded"
    if selection.min_reward is not None:
        if source.reward is None:
            raise ValueError(f"{source.name} has no reward to select it by; give --min-reward None to train on all")
        if source.reward < selection.min_reward:
            return None, "below_min_reward"
    if source.num_turns < max(selection.min_turns, 1):
        return None, "below_min_turns"
    try:
        told = source.dialogue
        sample = conversation_sample(*render_transcript(renderer, told.messages, cut=told.cut, known=told.known))
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from error
    if len(sample.ids) <= selection.max_tokens:
        return sample, "kept"
    return _shorten(sample, selection, source.name)


def _shorten(sample: Sample, selection: Selection, name: str) -> tuple[Sample | None, str]:
    size = selection.max_tokens
    match selection.overlong:
        case Overlong.REFUSE:
            raise ValueError(
                f"{name} has {len(sample.ids)} tokens, over learner.max_tokens={size}; raise it, or give --overlong "
                "drop or cut"
            )
        case Overlong.DROP:
            return None, "too_long"
        case Overlong.CUT:
            cut = replace(sample, ids=sample.ids[:size], mask=sample.mask[:size], logprobs=sample.logprobs[:size])
            return (cut, "cut") if cut.mask.any() else (None, "too_long")


def _write_manifest(path: Path, demonstrations: Demonstrations) -> None:
    rows = [
        [*asdict(item.sample.location).values(), item.sample.num_tokens, item.sample.num_trained, item.family]
        for item in demonstrations.items
    ]
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump({"counts": demonstrations.counts, "demonstrations": rows}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _read_manifest(path: Path) -> Demonstrations:
    record = json.loads(path.read_text())
    return Demonstrations(
        items=[
            Demonstration(
                sample=SizedSample(
                    location=Location(segment=segment, offset=offset, length=length),
                    num_tokens=num_tokens,
                    num_trained=num_trained,
                ),
                family=family,
            )
            for segment, offset, length, num_tokens, num_trained, family in record["demonstrations"]
        ],
        counts=record["counts"],
    )
