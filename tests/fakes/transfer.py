"""FakeSender and FakeReceiver: transfers without GPUs; what they say of their weights is FakeServer's `say`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from actors.inference_config import DType, Transport, UpdateMode
from actors.vllm_transfer import Sending
from actors.weight_noise import disturb
from tests.fakes.synced_server import FakeSource, say
from trajectories.schema import PolicyVersion


class FakeReceiver:
    """A server that keeps the tensors named in `deaf` as they came first."""

    def __init__(self, name: str, *, deaf: Sequence[str] = ()) -> None:
        self.name = name
        self.pid = 1
        self.deaf = tuple(deaf)
        self.fails: Exception | None = None
        self.fails_at_probe: Exception | None = None
        self.is_open = False
        self.num_running = 0
        self.modes: list[UpdateMode] = []
        self.quarantined = ""
        self.num_left = 0
        self.received: list[PolicyVersion] = []
        self.heard: PolicyVersion | None = None
        """The version that the driver knows of."""
        self.weights: dict[str, torch.Tensor] = {}

    @property
    def actor(self) -> "FakeReceiver":
        return self

    def receive(self, sending: Sending, tensors: dict[str, torch.Tensor]) -> None:
        kept = {name: self.weights[name] for name in self.deaf if name in self.weights}
        self.weights = tensors | kept
        self.is_open = sending.admits
        self.received.append(sending.version)
        self.modes.append(sending.mode)

    async def refresh(self, deadline_s: float) -> None:
        if self.fails is not None:
            raise self.fails
        self.heard = self.received[-1] if self.received and self.is_open else None

    async def close_transfer(self, deadline_s: float) -> None:
        self.num_left += 1

    async def admit(self, deadline_s: float) -> None:
        self.is_open = True

    async def probe(self, ids: Sequence[int], deadline_s: float) -> list[float]:
        if self.fails_at_probe is not None:
            raise self.fails_at_probe
        return say(self.weights, ids)

    async def quarantine(self, reason: str, deadline_s: float) -> None:
        self.is_open, self.quarantined = False, reason


class FakeSender(FakeSource):
    """A Sender whose weights are FakeSource's."""

    num_restarts = 0

    def __init__(self) -> None:
        super().__init__()
        self.met: list[list[FakeReceiver]] = []

    async def open_transfer(
        self, backend: Transport, servers: Sequence[Any], server_ranks: Sequence[int], deadline_s: float
    ) -> tuple[str, ...]:
        assert len(servers) == len(server_ranks)
        self.met.append(list(servers))
        return tuple(self.weights)

    async def send_weights(self, sending: Sending) -> None:
        await asyncio.sleep(self.delay_s)
        noise = sending.noise
        for server in self.met[-1]:
            server.receive(
                sending,
                {
                    name: disturb(tensor, name, noise) if noise is not None and name in noise.names else tensor.clone()
                    for name, tensor in self.weights.items()
                },
            )


class FakeFleet:
    """A ReceivingFleet."""

    dtype = DType.FLOAT32
    vocab_size = 64
    ranks_per_server = 1

    def __init__(self, *servers: FakeReceiver) -> None:
        self.servers = servers
        self.heal: Callable[[Any], Awaitable[None]] | None = None

    def heal_with(self, heal: Callable[[Any], Awaitable[None]]) -> None:
        self.heal = heal
