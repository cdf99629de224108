"""Harbor's timeout rule and the paper's, by numbers worked out by hand."""

import pytest

from envs.timeouts import harbor_timeout_s, paper_timeout_s


@pytest.mark.parametrize(
    ("task_s", "given", "expected"),
    [
        (900.0, {}, 900.0),
        (900.0, {"max_s": 600.0}, 600.0),
        (900.0, {"max_s": 600.0, "multiplier": 2.0}, 1200.0),  # the cap is no ceiling
        (900.0, {"override_s": 100.0, "max_s": 600.0, "multiplier": 3.0}, 300.0),
        (900.0, {"multiplier": 2.0, "phase_multiplier": 0.5}, 450.0),
        (None, {"max_s": 600.0, "multiplier": 2.0}, None),
        (None, {"override_s": 50.0}, 50.0),
    ],
)
def test_harbors_rule_caps_and_then_multiplies(task_s: float | None, given: dict[str, float], expected: float) -> None:
    assert harbor_timeout_s(task_s, **given) == expected


@pytest.mark.parametrize(
    ("base_s", "multiplier", "expected"),
    [(900.0, 2.0, 1800.0), (900.0, 16.0, 7200.0), (3600.0, 2.0, 7200.0), (None, 2.0, 7200.0)],
)
def test_the_papers_rule_multiplies_and_then_caps_at_two_hours(base_s, multiplier, expected) -> None:
    assert paper_timeout_s(base_s, multiplier=multiplier) == expected


def test_the_two_rules_differ_where_the_cap_binds() -> None:
    assert harbor_timeout_s(900.0, max_s=7200.0, multiplier=16.0) == 14400.0
    assert paper_timeout_s(900.0, multiplier=16.0) == 7200.0
