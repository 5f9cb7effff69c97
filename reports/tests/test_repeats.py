import pytest

from reports.intervals import t_quantile, t_tail
from reports.repeats import beyond_chance, changes


def test_a_change_without_noise_is_certain():
    found = changes({"a": [0.1, 0.1, 0.1], "b": [0.0, 0.0, 0.0]})
    assert (found["a"].worse, found["a"].chance) == (pytest.approx(0.1), 0.0)
    assert found["b"].chance == 1.0


def test_the_noise_of_all_routers_counts_together():
    alone = changes({"a": [0.08, 0.1, 0.12]})["a"]
    together = changes({name: [0.08, 0.1, 0.12] for name in "abc"})["a"]
    assert together.chance < alone.chance
    assert together.high - together.low < alone.high - alone.low


def test_a_much_noisier_router_keeps_its_own_noise():
    found = changes({"calm": [0.1, 0.1, 0.1001], "calmer": [0.1, 0.1, 0.1001], "wild": [-0.5, 0.1, 0.7]})
    assert found["wild"].chance > 0.3
    assert found["wild"].low < 0 < found["wild"].high


def test_the_interval_holds_the_change():
    found = changes({"a": [0.02, 0.05, 0.07, 0.01]})["a"]
    assert found.low < found.worse < found.high


def test_what_is_judged_together_needs_more_certainty():
    assert beyond_chance([0.04]) == [True]
    assert beyond_chance([0.04, 0.5, 0.6, 0.7]) == [False, False, False, False]
    assert beyond_chance([0.001, 0.9, 0.02]) == [True, False, True]
    assert beyond_chance([]) == []


def test_the_tail_and_the_quantile_of_t_agree():
    for freedom in (1, 2, 6, 50, 300):
        for probability in (0.6, 0.95, 0.999):
            assert t_tail(t_quantile(probability, freedom), freedom) == pytest.approx(1 - probability, abs=1e-6)
        assert t_tail(-1.0, freedom) + t_tail(1.0, freedom) == pytest.approx(1)
        assert t_tail(0.0, freedom) == pytest.approx(0.5)
