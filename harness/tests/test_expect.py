"""Expectations: each kind of check, on both sides, and what is refused before anything runs."""

import pytest

from harness.errors import UsageError
from harness.expect import Expectation, judge
from harness.scenario import builtin_names, check_scenario, load_scenario
from harness.tests.test_scenario import GOOD

FIGURES = {
    "a": {"hit_rate": 0.9, "ttft_ms": {"p99": 800.0}, "preemptions": 3},
    "b": {"hit_rate": 0.5, "ttft_ms": {"p99": 400.0}, "preemptions": 0},
    "c": {"hit_rate": None, "ttft_ms": {"p99": 900.0}, "preemptions": 1},
}


def met(**check) -> bool:
    (finding,) = judge([Expectation(that="t", **check)], FIGURES)
    return finding.met


def test_best_follows_the_direction_of_the_metric():
    assert met(metric="ttft_ms.p99", best="b")
    assert not met(metric="ttft_ms.p99", best="a")
    assert met(metric="hit_rate", best="a")
    assert not met(metric="hit_rate", best="b")


def test_above_and_below_compare_with_a_router_or_a_number_by_a_factor():
    assert met(metric="ttft_ms.p99", router="a", above="b", times=1.9)
    assert not met(metric="ttft_ms.p99", router="a", above="b", times=2.1)
    assert met(metric="ttft_ms.p99", router="b", below="a", times=1.9)
    assert not met(metric="ttft_ms.p99", router="b", below="a", times=2.1)
    assert met(metric="preemptions", router="b", below=1)
    assert not met(metric="preemptions", router="a", below=3)


def test_rising_and_falling_look_along_the_routers():
    assert met(metric="ttft_ms.p99", rising=("b", "a", "c"))
    assert not met(metric="ttft_ms.p99", rising=("a", "b", "c"))
    assert met(metric="ttft_ms.p99", falling=("c", "a", "b"))


def test_lowest_allows_several_places_for_the_minimum():
    assert met(metric="ttft_ms.p99", lowest=("a", "b"))
    assert not met(metric="ttft_ms.p99", lowest=("a", "c"))


def test_what_is_not_known_is_not_met_and_says_so():
    (finding,) = judge([Expectation(that="t", metric="hit_rate", router="c", above=0.1)], FIGURES)
    assert not finding.met
    assert "hit_rate of c is not known" in finding.found
    (finding,) = judge([Expectation(that="t", metric="hit_rate", best="z")], FIGURES)
    assert not finding.met


def test_a_finding_shows_every_figure():
    (finding,) = judge([Expectation(that="b is fastest", metric="ttft_ms.p99", best="b")], FIGURES)
    assert str(finding) == "as expected: b is fastest (ttft_ms.p99: a 800, b 400, c 900)"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"metric": "ttft_ms.p98", "best": "random"}, "ttft_ms"),
        ({"metric": "ttft_ms.p99"}, "exactly one of"),
        ({"metric": "ttft_ms.p99", "best": "random", "rising": ["random"]}, "best and rising"),
        ({"metric": "ttft_ms.p99", "above": 3}, "router goes with"),
        ({"metric": "ttft_ms.p99", "best": "random", "times": 0}, "above 0"),
        ({"metric": "ttft_ms.p99", "best": "nobody"}, "'nobody'"),
    ],
)
def test_a_check_that_cannot_work_is_refused_with_the_scenario(table, said):
    scenario = {**GOOD, "routers": ["random"], "expect": [{"that": "x", **table}]}
    with pytest.raises(UsageError, match=said):
        check_scenario(scenario, "file.toml")


def test_routers_given_on_the_command_line_replace_what_was_expected():
    for name in builtin_names():
        assert load_scenario(name, routers=["random"]).expect == ()
