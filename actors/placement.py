"""Places for actors: placement groups that come within a deadline, or an error that names what is missing.

Invariant: either every bundle is reserved or none is. Called by actors/inference_pool.py, and by recipes for what two
fleets share; actors/rollout_pool.py and actors/learner_group.py name with `unplaced` what keeps one from starting.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster import Resources
from actors.errors import ClusterError, DeadlineMissed, PlacementError

Place = PlacementGroupSchedulingStrategy
"""Where one actor goes."""
SHARED_GPU = 0.5
"""What each of two actors asks of the GPU that they share."""


async def reserve(bundles: Sequence[Mapping[str, float]], *, what: str, deadline_s: float) -> list[Place]:
    """A place for each bundle, on one node each, so that each can be given back alone.

    Raises PlacementError after the deadline: it names the resources, how much was asked for, and what was free.
    """
    groups = [placement_group([dict(bundle)], strategy="STRICT_PACK") for bundle in bundles]
    try:
        async with asyncio.timeout(deadline_s):
            for group in groups:
                ready: Any = group.ready()
                await ready  # a reference can be awaited; the group's own `wait` would block the loop
    except TimeoutError as error:
        held = [bundle for group, bundle in zip(groups, bundles, strict=True) if _is_reserved(group)]
        lacking = missing(bundles, held=held)
        _remove(groups)
        raise PlacementError(
            f"{what}: no place within {deadline_s:g} s; missing: {lacking or _scattered(bundles)}; lower the counts or "
            "add nodes"
        ) from error
    except BaseException:
        _remove(groups)
        raise
    return [PlacementGroupSchedulingStrategy(placement_group=group) for group in groups]


@asynccontextmanager
async def shared_gpus(number: int, *, num_cpus: float, what: str, deadline_s: float) -> AsyncIterator[list[Place]]:
    """So many places of one GPU, for the length of the block; two actors of SHARED_GPU each fit into one."""
    bundle = {"GPU": 1.0} | ({"CPU": num_cpus} if num_cpus else {})
    places = await reserve([bundle] * number, what=what, deadline_s=deadline_s)
    try:
        yield places
    finally:
        for place in places:
            give_back(place)


def give_back(place: Place) -> None:
    """To whoever waits for its resources."""
    remove_placement_group(place.placement_group)


def missing(bundles: Sequence[Mapping[str, float]], *, held: Sequence[Mapping[str, float]] = ()) -> str:
    """The resources of which less is free than the bundles take together; "" where every sum fits.

    `held`: those of the bundles that are reserved already, and so free for them.
    """
    wanted, free = _sums(bundles), Counter(ray.available_resources())
    free.update(_sums(held))
    total = ray.cluster_resources()
    return ", ".join(
        f"{amount:g} {name} ({free[name]:g} free of {total.get(name, 0):g} in the cluster)"
        for name, amount in wanted.items()
        if free[name] < amount
    )


def unplaced(error: DeadlineMissed, each: Resources) -> ClusterError:
    """What kept an actor that takes `each` from starting: a PlacementError where it was a resource, else `error`."""
    lacking = missing([{"CPU": each.num_cpus, "GPU": each.num_gpus}])
    return PlacementError(f"{error}; missing: {lacking}; add nodes or ask for fewer") if lacking else error


def _sums(bundles: Sequence[Mapping[str, float]]) -> "Counter[str]":
    sums: Counter[str] = Counter()
    for bundle in bundles:
        sums.update({name: amount for name, amount in bundle.items() if amount})
    return sums


def _scattered(bundles: Sequence[Mapping[str, float]]) -> str:
    """Where every sum fits, no single node has room for the largest bundle."""
    return f"a node with room for {dict(max(bundles, key=lambda bundle: sum(bundle.values())))} (the sums fit)"


def _is_reserved(group: PlacementGroup) -> bool:
    return placement_group_table(group).get("state") == "CREATED"


def _remove(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)
