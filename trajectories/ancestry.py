"""Ancestry: which weights and which optimizer steps are behind the present ones, over all restores.

Invariant: a restore starts a lineage at a version of an earlier one, so a lineage's past is one chain of (lineage, n).
Read by the ledger (what was trained), the Group buffer (what is still kin) and the audit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trajectories.schema import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """The past of one lineage.

    Lineage 1 restored from 0:20 -> Ancestry(lineage=1, forks={0: 20}): the weights 0:20 are behind it and the step
    taken at 0:19 is, the step taken at 0:20 is not.
    """

    lineage: int
    forks: Mapping[int, int]
    """Earlier lineage -> the last n whose weights the present ones descend from; other lineages are absent."""

    def has_weights(self, version: PolicyVersion) -> bool:
        """Whether the present weights descend from those of `version`, or are of its lineage."""
        return version.lineage == self.lineage or version.n <= self.forks.get(version.lineage, -1)

    def has_step(self, version: PolicyVersion) -> bool:
        """Whether the optimizer step taken at `version` is behind the present weights."""
        return version.lineage == self.lineage or version.n < self.forks.get(version.lineage, 0)


def ancestry_of(lineage: int, parents: Mapping[int, PolicyVersion]) -> Ancestry:
    """The past of `lineage`; `parents` maps each lineage but the first to the version that it was restored from."""
    forks: dict[int, int] = {}
    reach: int | None = None
    child = lineage
    while child in parents:
        parent = parents[child]
        reach = parent.n if reach is None else min(reach, parent.n)
        forks[parent.lineage] = reach
        child = parent.lineage
    return Ancestry(lineage=lineage, forks=forks)
