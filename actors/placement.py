"""Places for actors: a placement group that comes within a deadline, or an error that names what is missing.

Invariant: either every bundle is reserved or none is. Called by actors/inference_pool.py, and by recipes for what two
fleets share.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.errors import PlacementError

Place = PlacementGroupSchedulingStrategy
"""Where one actor goes."""
SHARED_GPU = 0.5
"""What each of two actors asks of the GPU that they share."""


async def reserve(bundles: Sequence[Mapping[str, float]], *, what: str, deadline_s: float) -> PlacementGroup:
    """A placement group of these bundles, each on one node.

    Raises PlacementError after the deadline: it names the resources, how much was asked for, and what was free.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        # Awaited as a reference: `wait` would block the loop.
        await asyncio.wait_for(_as_future(group.ready()), deadline_s)
    except TimeoutError as error:
        free, total = ray.available_resources(), ray.cluster_resources()
        remove_placement_group(group)
        raise PlacementError(_missing(bundles, free, total, what=what, deadline_s=deadline_s)) from error
    except BaseException:
        remove_placement_group(group)
        raise
    return group


@asynccontextmanager
async def shared_gpus(number: int, *, num_cpus: float, what: str, deadline_s: float) -> AsyncIterator[list[Place]]:
    """So many places of one GPU, for the length of the block; two actors of SHARED_GPU each fit into one."""
    bundle = {"GPU": 1.0} | ({"CPU": num_cpus} if num_cpus else {})
    group = await reserve([bundle] * number, what=what, deadline_s=deadline_s)
    try:
        yield [
            PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            for index in range(number)
        ]
    finally:
        remove_placement_group(group)


async def _as_future(reference: Any) -> Any:
    return await reference


def _missing(
    bundles: Sequence[Mapping[str, float]],
    free: Mapping[str, float],
    total: Mapping[str, float],
    *,
    what: str,
    deadline_s: float,
) -> str:
    wanted: Counter[str] = Counter()
    for bundle in bundles:
        wanted.update({name: amount for name, amount in bundle.items() if amount})
    each = max(bundles, key=lambda bundle: sum(bundle.values()))
    lines = [
        f"{amount:g} {name} ({free.get(name, 0):g} free of {total.get(name, 0):g} in the cluster)"
        for name, amount in wanted.items()
        if free.get(name, 0) < amount
    ]
    # Where every sum fits, no single node has room for the largest bundle.
    shortage = ", ".join(lines) or f"a node with room for {dict(each)} (the sums fit, but spread over nodes)"
    return f"{what}: no place within {deadline_s:g} s; missing: {shortage}; lower the counts or add nodes"
