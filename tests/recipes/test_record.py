"""What a run records of itself."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from recipes.record import code_revision, differences, hardware, package_versions, to_json


class Kind(StrEnum):
    FAST = "fast"


@dataclass(frozen=True, kw_only=True)
class Inner:
    lr: float = 0.5
    kinds: tuple[Kind, ...] = (Kind.FAST,)
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    run: Path = Path("runs/x")
    inner: Inner = field(default_factory=Inner)
    env: dict[Kind, Path] = field(default_factory=lambda: {Kind.FAST: Path("a")})


def test_nested_configs_become_plain_json():
    assert to_json(Outer()) == {
        "run": "runs/x",
        "inner": {"lr": 0.5, "kinds": ["fast"], "limit": None},
        "env": {"fast": "a"},
    }
    assert type(to_json(Kind.FAST)) is str


def test_numbers_become_json_numbers_and_not_finite_ones_null():
    assert to_json([np.float32(0.5), np.int64(3), math.nan, math.inf, {2, 1}]) == [0.5, 3, None, None, [1, 2]]


def test_a_value_without_json_form_is_named_by_its_field():
    with pytest.raises(ValueError, match=r"inner\.lr has no JSON form: function"):
        to_json({"inner": {"lr": lambda: 0}})


def test_differences_name_each_leaf_by_its_dotted_name():
    before = {"steps": 60, "inner": {"lr": 0.5, "old": 1}, "same": [1, 2]}
    after = {"steps": 80, "inner": {"lr": 0.5, "new": True}, "same": [1, 2]}
    assert sorted(differences(before, after)) == [
        ("inner.new", None, True),
        ("inner.old", 1, None),
        ("steps", 60, 80),
    ]
    assert list(differences({"a": 1}, {"a": True})) == [("a", 1, True)]


def test_the_machine_and_the_packages_are_told():
    facts = hardware()
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert facts["memory_gb"] > 0.1
    assert "torch" in package_versions()
    revision = code_revision()
    assert not revision or len(revision["commit"]) == 40
