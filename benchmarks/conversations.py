"""Conversations of fixed lengths in an instant world, played through the shipped rollout path, for benchmarks.

Invariant: every reply has exactly `reply_tokens` tokens, and no two conversations share a prompt. Called by
benchmarks/inference.py and benchmarks/weight_sync.py.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from envs.conversation import SampledConversation
from envs.episode import Episode
from envs.group import run_group
from envs.harness import Conversation
from envs.renderer import ChatRenderer, load_renderer
from envs.sampler import Sampler, SamplingParams
from envs.sandbox import Sandbox
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec
from trajectories.schema import Outcome, Trajectory, Treatment

WORDS = ("sort", "list", "count", "file", "line", "word", "name", "test", "open", "read", "write", "move", "copy")
CONTEXT_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Lengths of a conversation, in tokens where not said otherwise."""

    num_turns: int
    prompt_tokens: int = 512
    observation_tokens: int = 64
    reply_tokens: int = 64


class EndlessRenderer:
    """A Renderer without stop ids, so that every reply runs to its limit."""

    stop_ids: tuple[int, ...] = ()

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer

    def first(self, prompt: str) -> tuple[int, ...]:
        """See Renderer."""
        return self._renderer.first(prompt)

    def next(
        self, context_ids: Sequence[int], sampled_ids: Sequence[int], observation: str
    ) -> tuple[int, tuple[int, ...]]:
        """See Renderer."""
        return self._renderer.next(context_ids, sampled_ids, observation)

    def decode(self, ids: Sequence[int]) -> str:
        """See Renderer."""
        return self._renderer.decode(ids)


class InstantHarness:
    """Says one text after the other; the Sandbox is not touched."""

    name = "instant"

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        """`texts`: the messages of each Task id."""
        self._texts = texts

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Plays every message."""
        for text in self._texts[task.id]:
            await conversation.ask(text)


class InstantProvider:
    """Sandboxes that take no time and hold nothing."""

    name = "instant"

    async def provenance(self) -> Mapping[str, str]:
        """Nothing isolates, since nothing runs."""
        return {}

    async def close(self) -> None:
        """Keeps nothing."""

    @asynccontextmanager
    async def start(self, task: Task, *, owner: str) -> AsyncGenerator[Sandbox]:
        """A Sandbox that nobody may use."""
        yield cast(Sandbox, object())


class Player:
    """Plays rounds of conversations with one Sampler."""

    def __init__(self, model: Path, sampler: Sampler) -> None:
        self._renderer = load_renderer(model)
        self._sampler = sampler

    def texts(self, shape: Shape, num: int, *, seed: int) -> dict[str, list[str]]:
        """What the world says in `num` conversations, new ones for each seed: Task id to messages."""
        return {f"instant-{seed}-{k}": self._texts(shape, f"{seed}.{k}") for k in range(num)}

    async def play(self, shape: Shape, texts: Mapping[str, Sequence[str]]) -> list[Trajectory]:
        """All conversations at once."""
        episode = Episode(
            provider=InstantProvider(),
            harness=InstantHarness(texts),
            converse=lambda task, key: SampledConversation(
                EndlessRenderer(self._renderer),
                self._sampler,
                SamplingParams(max_tokens=shape.reply_tokens),
                max_turns=shape.num_turns,
                context_tokens=CONTEXT_TOKENS,
                key=key,
            ),
            treatments=dict.fromkeys(Outcome, Treatment.ZERO),  # no Verifier runs
        )
        groups = await asyncio.gather(
            *(run_group(_task(name), size=1, episode=episode, group_id=name, deadline_s=3600) for name in texts)
        )
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        for trajectory in trajectories:
            assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
        return trajectories

    def _texts(self, shape: Shape, seed: str) -> list[str]:
        draw = random.Random(seed)
        lengths = [shape.prompt_tokens] + [shape.observation_tokens] * (shape.num_turns - 1)
        return [self._text(draw, length) for length in lengths]

    def _text(self, draw: random.Random, num_tokens: int) -> str:
        words = [draw.choice(WORDS) for _ in range(num_tokens)]
        while len(self._renderer.first(" ".join(words))) > num_tokens:
            words = words[: -max(1, (len(self._renderer.first(" ".join(words))) - num_tokens) // 4)]
        return " ".join(words)


def _task(name: str) -> Task:
    return Task(
        id=name,
        instruction="",
        environment=Environment(),
        verifier=VerifierSpec(),
        limits=Limits(),
        provenance=Provenance(),
        path=Path("/nonexistent"),
    )
