"""A stream of Groups that feeds a learner: issued as the buffer admits them, handed out a step at a time.

Invariant: every Group that was admitted reaches the buffer, or `take` raises what kept it from coming.
Made by actors/rollout_pool.py; recipes take from it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from envs.task import Task
from trajectories.buffer import GroupBuffer
from trajectories.handle import GroupHandle
from trajectories.schema import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A Group to play."""

    task: Task
    group_id: str


class RolloutStream:
    """Finished Groups for a learner. Consumes Tasks, waits for permits and slots, and unblocks `take`."""

    def __init__(
        self,
        requests: Iterable[GroupRequest],
        play: Callable[[GroupRequest], Awaitable[GroupHandle]],
        buffer: GroupBuffer,
        oldest_served: Callable[[], PolicyVersion | None],
    ) -> None:
        self._requests = requests
        self._play = play
        self._buffer = buffer
        self._oldest_served = oldest_served
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reopened = asyncio.Event()

    def reopen(self) -> None:
        """Tasks that had ended may have come back: they are issued before anyone is told of an end."""
        self._buffer.reopen()
        self._reopened.set()

    async def issue(self) -> None:
        """Starts a Group whenever admission permits one, until the stream is closed; the end of Tasks may be undone."""
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                for request in self._requests:
                    await self._buffer.admit(request.group_id)
                    # Without a server that samples, whatever comes will be at the buffer's version or later.
                    self._buffer.start(request.group_id, self._oldest_served() or self._buffer.version)
                    running.add(task := asyncio.create_task(self._feed(request)))
                    task.add_done_callback(running.discard)
                if running:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)  # it may bring a Task back
                    continue
                self._reopened.clear()
                self._buffer.close()
                await self._reopened.wait()
        except Exception as error:
            self._fail(error)
        finally:
            await cancel_all(running)

    async def take(self, version: PolicyVersion, deadline_s: float) -> list[GroupHandle]:
        """The Groups of one step at `version`, oldest first; raises what broke a rollout worker, if one broke."""
        taking = asyncio.create_task(self._buffer.take(version, deadline_s))
        try:
            await asyncio.wait({taking, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return await taking
        finally:
            taking.cancel()

    async def _feed(self, request: GroupRequest) -> None:
        try:
            self._buffer.put(await self._play(request))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Hands what broke on to `take`, which raises it; the first failure counts."""
        if not self._failure.done():
            self._failure.set_exception(error)


async def cancel_all(tasks: set[asyncio.Task[Any]]) -> None:
    """Returns when all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
