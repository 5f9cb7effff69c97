import random
from collections import Counter
from dataclasses import asdict
from statistics import NormalDist

import pytest

from reports import arm_metrics, call, fleet_frame, make_arms, requests_frame, winner
from reports.compare import LOST_MORE, outcome
from reports.intervals import t_quantile
from reports.tests.rows_by_hand import MS, request
from reports.tests.synthetic import make_run


def arms_of(rows, samples=()):
    requests, fleet = requests_frame(rows), fleet_frame(samples)
    routers = dict.fromkeys(row["router"] for row in rows)
    pooled, each = {}, []
    for router in routers:
        own, its = requests[requests["router"] == router], fleet[fleet["router"] == router]
        pooled[router] = arm_metrics(own, its)
        for repeat in sorted(own["repeat"].unique()):
            metrics = arm_metrics(own[own["repeat"] == repeat], its[its["repeat"] == repeat])
            each.append({"router": router, "repeat": int(repeat), "metrics": metrics})
    return make_arms(requests, fleet, pooled, each)


def rows_with_ttft(router, ttfts_ms, repeat=0):
    return [
        request(
            n,
            router=router,
            repeat=repeat,
            sent_us=n * 1_000 * MS,
            first_token_us=int((n * 1_000 + ttft) * MS),
            last_token_us=(n * 1_000 + 900) * MS,
            end_us=(n * 1_000 + 900) * MS,
        )
        for n, ttft in enumerate(ttfts_ms)
    ]


def noisy(seed, middle, count=200, width=40):
    chance = random.Random(seed)
    return [middle + chance.gauss(0, width) for _ in range(count)]


def test_a_clear_difference_has_a_winner():
    arms = arms_of([*rows_with_ttft("a", noisy(1, 300)), *rows_with_ttft("b", noisy(2, 400))])
    assert winner("ttft_ms.p50", arms) == "a"
    assert winner("ttft_ms.mean", arms) == "a"
    found = call("ttft_ms.p50", arms)
    assert found.runner_up == "b"
    assert found.interval[0] < found.interval[1] < 0
    assert found.gain == pytest.approx(0.25, abs=0.05)


def test_a_difference_within_its_interval_is_too_close_to_call():
    arms = arms_of([*rows_with_ttft("a", noisy(1, 300)), *rows_with_ttft("b", noisy(2, 303))])
    found = call("ttft_ms.p50", arms)
    assert found.winner is None
    assert found.best in ("a", "b")
    assert set(found.contenders) == {"a", "b"}
    assert found.interval[0] < 0 < found.interval[1]


def test_the_same_difference_is_clear_when_sessions_differ_from_each_other_but_not_between_arms():
    shared = noisy(1, 300, width=80)
    paired = arms_of([*rows_with_ttft("a", shared), *rows_with_ttft("b", [value + 6 for value in shared])])
    apart = arms_of([*rows_with_ttft("a", shared), *rows_with_ttft("b", noisy(9, 306, width=80))])
    assert winner("ttft_ms.mean", paired) == "a"
    assert winner("ttft_ms.mean", apart) is None


def test_identical_arms_are_equal_and_nobody_wins():
    rows = noisy(3, 300)
    arms = arms_of([*rows_with_ttft("a", rows), *rows_with_ttft("b", rows)])
    found = call("ttft_ms.p50", arms)
    assert (found.winner, found.best, found.basis) == (None, None, "equal")


def test_a_certain_difference_too_small_to_matter_has_no_winner():
    arms = arms_of(
        [*rows_with_ttft("a", [300] * 50), *rows_with_ttft("b", [301] * 50), *rows_with_ttft("c", [500] * 50)]
    )
    found = call("ttft_ms.p50", arms)
    assert found.winner is None
    assert found.contenders == ("a", "b")


def test_who_beats_only_some_is_no_winner():
    arms = arms_of(
        [*rows_with_ttft("a", noisy(1, 300)), *rows_with_ttft("b", noisy(2, 302)), *rows_with_ttft("c", noisy(3, 500))]
    )
    found = call("ttft_ms.p50", arms)
    assert found.winner is None
    assert "c" not in found.contenders


def test_order_of_arms_does_not_matter():
    a, b = rows_with_ttft("a", noisy(1, 300)), rows_with_ttft("b", noisy(2, 340))
    one, two = call("ttft_ms.p99", arms_of([*a, *b])), call("ttft_ms.p99", arms_of([*b, *a]))
    assert one == two


def test_higher_is_better_where_the_table_says_so():
    rows = [
        row | {"cached_tokens": base + n % 9}
        for router, base in (("a", 20), ("b", 60))
        for n, row in enumerate(rows_with_ttft(router, [300] * 60))
    ]
    assert winner("hit_rate", arms_of(rows)) == "b"


def test_few_sessions_name_no_winner():
    arms = arms_of([*rows_with_ttft("a", [300, 301]), *rows_with_ttft("b", [900, 901])])
    found = call("ttft_ms.p50", arms)
    assert (found.winner, found.best, found.interval) == (None, "a", None)


def test_an_unknown_figure_and_one_without_direction_have_no_best():
    arms = arms_of([*rows_with_ttft("a", [300] * 9), *rows_with_ttft("b", [500] * 9)])
    assert call("hit_rate", arms).best is None
    assert call("in_flight_mean", arms).best is None


def test_turns_of_few_sessions_are_not_many_samples():
    def rows(router, means):
        return [
            row | {"session": f"s{n // 50}"}
            for n, row in enumerate(rows_with_ttft(router, [mean + turn % 3 for mean in means for turn in range(50)]))
        ]

    arms = arms_of([*rows("a", [300, 350, 380, 320]), *rows("b", [390, 340, 310, 360])])
    assert winner("ttft_ms.mean", arms) is None


def test_with_three_repeats_the_spread_between_repeats_decides():
    def repeats(router, middles):
        return [
            row
            for repeat, middle in enumerate(middles)
            for row in rows_with_ttft(router, noisy(repeat, middle, 60, 5), repeat)
        ]

    noisy_machine = arms_of([*repeats("a", (300, 360, 330)), *repeats("b", (350, 330, 345))])
    found = call("ttft_ms.p50", noisy_machine)
    assert found.winner is None
    assert found.basis == "3 repeats"
    steady_machine = arms_of([*repeats("a", (300, 302, 299)), *repeats("b", (350, 351, 347))])
    assert winner("ttft_ms.p50", steady_machine) == "a"


def test_errors_are_compared_as_shares():
    def rows(router, failing, count):
        return [
            request(
                n, router=router, session=f"s{n}", sent_us=n * MS * 10, status="error" if n % 10 < failing else "ok"
            )
            for n in range(count)
        ]

    arms = arms_of([*rows("a", 4, 200), *rows("b", 1, 1_000)])
    assert arms[1].metrics["errors"] > arms[0].metrics["errors"]
    assert winner("errors", arms) == "b"


def failing(router, bad, *, count=120, repeat=0):
    """Requests of which some fail, six of a session, ten a second."""
    return [
        request(n, router=router, repeat=repeat, session=f"s{n // 6}", turn=n % 6, status="error" if n in bad else "ok")
        | {"sent_us": n * 100 * MS, "end_us": n * 100 * MS + 500 * MS}
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (range(0, 120, 20), [n for n in range(120) if n % 20 < 9]),  # alone
        (range(40, 46), range(40, 94)),  # in one stretch of time
        (range(18, 24), [n for n in range(108) if n // 6 % 2 == 0]),  # with their sessions
    ],
)
def test_six_failures_of_120_are_fewer_than_fifty_four(few, many):
    assert (len(few), len(many)) == (6, 54)
    found = call("errors", arms_of([*failing("a", few), *failing("b", many)]))
    assert found.winner == "a"
    assert call("errors", arms_of([*failing("b", many), *failing("a", few)])) == found


def test_failures_of_repeats_are_counted_and_not_judged_by_their_spread():
    """2 of 40 in each repeat against 10, 18 and 26; then 0 in each against 1, which is little."""
    chance = random.Random(1)
    uneven = [
        row
        for repeat, count in enumerate((10, 18, 26))
        for router, bad in (("a", 2), ("b", count))
        for row in failing(router, chance.sample(range(40), bad), count=40, repeat=repeat)
    ]
    assert winner("errors", arms_of(uneven)) == "a"
    rare = [row for n in range(3) for bad in ((), (7,)) for row in failing("ab"[len(bad)], bad, count=40, repeat=n)]
    assert winner("errors", arms_of(rare)) is None


@pytest.mark.parametrize(
    ("count", "bad", "expected"),
    [
        (120, range(40, 46), None),  # one event
        (1_200, range(400, 460), None),  # one event still
        (120, (3,), None),
        (5_000, range(7, 5_000, 50), "a"),
    ],
)
def test_an_arm_without_failures_wins_only_over_many_events(count, bad, expected):
    """It cannot tell itself whether failures come in crowds; the other arm tells that for both."""
    assert winner("errors", arms_of([*failing("a", (), count=count), *failing("b", bad, count=count)])) == expected


def test_routers_of_one_character_are_rarely_told_apart():
    named = Counter()
    for seed in range(20):
        rows, samples = make_run(["round-robin"], seed=seed, sessions=20, turns=4)
        others, more = make_run(["round-robin"], seed=1_000 + seed, sessions=20, turns=4)
        twin = [row | {"router": "twin"} for row in others]
        arms = arms_of([*rows, *twin], [*samples, *(sample | {"router": "twin"} for sample in more)])
        for address in ("ttft_ms.p50", "ttft_ms.p99", "session_e2e_ms.p99", "output_tokens_per_s", "hit_rate"):
            named[address] += winner(address, arms) is not None
    assert sum(named.values()) <= 10  # of 100, where 5 are to be expected
    assert max(named.values()) <= 5


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (59, 2.0010), (200, 1.9719)],
)
def test_students_quantiles_are_those_of_the_tables(freedom, expected):
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=1e-4)
    assert t_quantile(0.975, 201) == NormalDist().inv_cdf(0.975)


def test_the_order_of_arms_decides_nothing():
    """A/B and B/A give the same verdict, also where two are equal and a third is worse."""
    rows = {name: rows_with_ttft(name, noisy(1, middle)) for name, middle in (("a", 300), ("b", 300), ("c", 400))}
    for address in ("ttft_ms.p50", "ttft_ms.mean", "output_tokens_per_s", "errors"):
        found = [
            call(address, arms_of([row for name in order for row in rows[name]]))
            for order in ("abc", "bca", "cab", "cba")
        ]
        assert len({(one.winner, one.best, one.runner_up, one.basis, frozenset(one.contenders)) for one in found}) == 1


def test_a_figure_without_a_model_of_chance_is_not_judged_from_one_repeat():
    arms = arms_of([*rows_with_ttft("a", noisy(1, 300)), *rows_with_ttft("b", noisy(2, 400))])
    found = call("ttft_ms.max", arms)
    assert (found.winner, found.best, found.basis) == (None, None, "not judged")
    three = [
        row
        for n in range(3)
        for row in rows_with_ttft("a", noisy(n, 300), n) + rows_with_ttft("b", noisy(9 - n, 600), n)
    ]
    assert call("ttft_ms.max", arms_of(three)).winner == "a"


@pytest.mark.parametrize(("lost", "winner_", "basis"), [((60, 4), None, LOST_MORE), ((6, 4), "a", None)])
def test_who_lost_clearly_more_requests_wins_no_time(lost, winner_, basis):
    rows = [*rows_with_ttft("a", noisy(1, 300)), *rows_with_ttft("b", noisy(2, 400))]
    for router, count in zip("ab", lost, strict=True):
        for row in [row for row in rows if row["router"] == router][:count]:
            row["status"] = "error"
    found = call("ttft_ms.p50", arms_of(rows))
    assert (found.winner, found.best) == (winner_, "a")
    assert basis in (None, found.basis)
    assert outcome(asdict(found)) == (winner_ or LOST_MORE)


def test_losses_cost_no_figure_that_is_no_time():
    rows = [*rows_with_ttft("a", noisy(1, 300)), *rows_with_ttft("b", noisy(2, 400))]
    for n, row in enumerate(rows):
        row |= {"prompt_tokens": 100, "cached_tokens": 80 if row["router"] == "a" else 20}
        row["status"] = "error" if n < 60 else "ok"
    assert winner("hit_rate", arms_of(rows)) == "a"
