"""The checkpoints that a run writes while it trains on, and what makes one count.

Invariant: state.json names a checkpoint only once all of it is on the disk, and says beside the name what was true when
the weights were copied; so a run that is killed at any moment goes on from a whole one.
Called by recipes/rloo.py and recipes/sft_progress.py.
"""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from actors.errors import CheckpointFailed
from recipes.run import Run

logger = logging.getLogger(__name__)

_OURS = re.compile(r"((?:\d+-)?\d+)(\.partial|\.old)?")
"""Names of checkpoints, and how those end that a writer left when it was killed."""


class SavingLearner(Protocol):
    """Who writes checkpoints: a learner group."""

    async def begin_save(self, directory: Path) -> None:
        """Copies what a checkpoint holds; it is written while training goes on."""
        ...

    async def is_saved(self) -> bool:
        """Whether the checkpoint that was begun is complete; CheckpointFailed when it cannot become so."""
        ...

    async def finish_save(self) -> None:
        """Returns when the checkpoint that was begun is complete; DeadlineMissed or CheckpointFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A checkpoint that is being written."""

    name: str
    state: Mapping[str, Any]
    """What state.json will hold."""
    then: Callable[[], None]
    """What is due when the run goes on from it."""


class Checkpoints:
    """Those of one run."""

    def __init__(self, run: Run, learner: SavingLearner) -> None:
        self.directory = run.directory / "checkpoints"
        self._run = run
        self._learner = learner
        self._begun: _Begun | None = None

    @property
    def newest_state(self) -> Mapping[str, Any] | None:
        """The state of the checkpoint that is being written, or else of the last complete one; None before both."""
        return self._begun.state if self._begun is not None else self._run.load_state()

    async def begin(self, name: str, state: Mapping[str, Any], then: Callable[[], None]) -> None:
        """Begins the checkpoint `name`, once the one before it is complete.

        When it is complete, state.json becomes `state` and `then` is called: in `poll`, `finish` or the next `begin`.
        """
        await self.finish()
        await self._learner.begin_save(self.directory / name)
        self._begun = _Begun(name=name, state=state, then=then)

    async def poll(self) -> None:
        """Lets the checkpoint that was begun count, if it is complete; does not wait for its files."""
        if self._begun is not None:
            await self._ask(self._begun, waits=False)

    async def finish(self) -> None:
        """Waits for the checkpoint that was begun, if one was, and lets it count."""
        if self._begun is not None:
            await self._ask(self._begun, waits=True)

    def forget(self) -> None:
        """The learner that was writing is gone; what it left does not count."""
        self._begun = None

    async def _ask(self, begun: _Begun, *, waits: bool) -> None:
        try:
            if waits:
                await self._learner.finish_save()
            elif not await self._learner.is_saved():
                return
        except CheckpointFailed:
            self._begun = None
            raise
        self._begun = None
        self._run.save_state(begun.state)
        logger.info("checkpoint=%s is complete", begun.name)
        begun.then()


def sweep(directory: Path, *, keep: Callable[[str], bool]) -> list[str]:
    """Removes what no run goes on from: checkpoints half written, and complete ones whose name `keep` refuses.

    A kill between the last byte of a checkpoint and its line in state.json leaves one of the latter. What has another
    name (a copy that a user keeps) stays. Returns the names.
    """
    found = sorted(directory.iterdir()) if directory.is_dir() else []
    ours = [(path, name) for path in found if (name := _OURS.fullmatch(path.name))]
    removed = [path for path, name in ours if name[2] or not keep(name[1])]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
        logger.warning("checkpoint=%s removed: the run does not go on from it", path.name)
    return [path.name for path in removed]
