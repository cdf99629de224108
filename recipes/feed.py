"""The feed of SFT: which demonstrations each step trains on.

Invariant: a batch is a function of the step alone, so a run that goes on continues the data where it stopped.
Called by recipes/sft.py.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from learners.plan import SizedSample
from recipes.demonstrations import Demonstration


class Feed:
    """Batches from passes over the demonstrations; the last batch of a pass may go on into the next."""

    def __init__(self, training: Sequence[Demonstration], batch_size: int, *, shuffle_seed: int | None) -> None:
        """`shuffle_seed` None repeats the given order in each pass."""
        self._training = training
        self._batch_size = batch_size
        self._shuffle_seed = shuffle_seed

    def num_steps(self, epochs: float | None, max_steps: int | None) -> int | None:
        """Steps until the data or the limit ends; None for no end."""
        limits = [max_steps] if max_steps else []
        if epochs is not None:
            limits.append(math.ceil(epochs * len(self._training) / self._batch_size))
        return min(limits, default=None)

    def batches(self, start: int) -> Iterator[list[SizedSample]]:
        """The batches of step `start` and on, without end."""
        flow = itertools.islice(itertools.chain.from_iterable(self._passes()), start * self._batch_size, None)
        while True:
            yield [demonstration.sample for demonstration in itertools.islice(flow, self._batch_size)]

    def _passes(self) -> Iterator[Sequence[Demonstration]]:
        if self._shuffle_seed is None:
            return itertools.repeat(self._training)
        shuffler = random.Random(self._shuffle_seed)
        return (shuffler.sample(list(self._training), len(self._training)) for _ in itertools.count())
