import pytest

from reports import METRICS
from reports.compare import LOST_MORE, Call
from reports.why import CAUSES, flags, has_rollouts, sentences


def arm(**changes):
    metrics = dict.fromkeys(METRICS) | {"requests": 100, "errors": 0, "incomplete": 0}
    return metrics | changes


def ms(value):
    return {"mean": value, "p50": value, "p90": value, "p95": value, "p99": value, "max": value, "count": 9}


def won(address="ttft_ms.p99", winner="a", runner_up="b"):
    return {address: Call(address, winner, winner, (winner,), runner_up, 0.5, (-120.0, -80.0), "")}


def reason(a, b):
    return sentences({"a": arm(ttft_ms=ms(100), **a), "b": arm(ttft_ms=ms(200), **b)}, won())[1]


def test_the_verdict_names_winner_figures_and_distance():
    text = sentences({"a": arm(ttft_ms=ms(100)), "b": arm(ttft_ms=ms(200))}, won())[0]
    gain = "50.0 % better, at least 40.0 % at 95 % confidence"
    assert text == f"a wins TTFT p99 (100.0 ms against 200.0 ms of b, {gain})."


def test_the_reason_follows_the_figures_in_both_directions():
    more_hits = reason({"hit_rate": 0.71}, {"hit_rate": 0.45})
    assert more_hits == "Why a beats b: 71.0 % of its prompt tokens were cached against 45.0 %."
    fewer_hits = reason({"hit_rate": 0.45, "queue_ms": ms(10)}, {"hit_rate": 0.71, "queue_ms": ms(90)})
    assert fewer_hits == (
        "Why a beats b: its requests waited 10.0 ms in the engines' queues on average against 90.0 ms, "
        "although its hit rate is lower (45.0 % against 71.0 %)."
    )


def test_the_strongest_causes_come_first_and_weak_ones_not_at_all():
    text = reason(
        {"hit_rate": 0.71, "load_cv": {"decode_blocks": 0.2, "waiting": None}, "preemptions": 0},
        {"hit_rate": 0.70, "load_cv": {"decode_blocks": 0.9, "waiting": None}, "preemptions": 80},
    )
    assert text.index("evenly") < text.index("preempted 0 times against 80")
    assert "cached" not in text


def test_without_a_cause_none_is_invented():
    text = reason({"hit_rate": 0.7}, {"hit_rate": 0.7})
    assert "is not in the figures" in text
    assert "although" not in text


def test_a_difference_that_is_too_close_to_call_is_no_cause_beyond_doubt():
    """The table beside the sentence would say so of the very figure that the sentence rests on."""
    routers = {
        "a": arm(ttft_ms=ms(100), load_cv={"decode_blocks": 0.29, "waiting": None}, hit_rate=0.7),
        "b": arm(ttft_ms=ms(200), load_cv={"decode_blocks": 0.44, "waiting": None}, hit_rate=0.8),
    }
    open_call = Call("load_cv.decode_blocks", None, "a", ("a", "b"), "b", 0.3, (-0.4, 0.1), "sessions")
    lost = Call("hit_rate", "b", "b", ("b",), "a", 0.1, (0.05, 0.15), "sessions")
    assert sentences(routers, won() | {"load_cv.decode_blocks": open_call, "hit_rate": lost})[1] == (
        "Why a beats b is not certain: its replicas were loaded more evenly (imbalance of decode blocks 0.29 against "
        "0.44), which by itself is too close to call, although its hit rate is lower (70.0 % against 80.0 %)."
    )
    queue = {"a": routers["a"] | {"queue_ms": ms(10)}, "b": routers["b"] | {"queue_ms": ms(90)}}
    text = sentences(queue, won() | {"load_cv.decode_blocks": open_call, "hit_rate": lost})[1]
    assert text.startswith("Why a beats b: its requests waited 10.0 ms")
    assert "evenly" not in text
    beaten = Call("load_cv.decode_blocks", None, "c", ("c", "a"), "a", 0.3, (-0.4, 0.1), "sessions")
    assert (
        "Why a beats b: its replicas were loaded more evenly"
        in (sentences(routers, won() | {"load_cv.decode_blocks": beaten})[1])
    )


def test_unknown_figures_explain_nothing():
    assert "is not in the figures" in reason({"hit_rate": 0.7}, {"hit_rate": None})


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.address)
def test_a_cause_that_speaks_for_one_side_speaks_against_the_other(cause):
    name, _, part = cause.address.partition(".")

    def with_value(value):
        return (
            arm(placement={"r0": value, "r1": 1000 - value})
            if name == "placement"
            else arm(**{name: {part: value} if part else value})
        )

    low, high = with_value(550), with_value(1_200 if name != "placement" else 900)
    assert cause.strength(low, high) == -cause.strength(high, low) != 0
    assert cause.strength(low, low) == 0


def test_no_winner_is_said_with_the_interval():
    calls = {"ttft_ms.p99": Call("ttft_ms.p99", None, "a", ("a", "b"), "b", 0.02, (-60.0, 24.0), "")}
    (text,) = sentences({"a": arm(ttft_ms=ms(100)), "b": arm(ttft_ms=ms(102))}, calls)
    assert text.startswith("Too close to call")
    assert text.endswith("a may be anything from 60.0 ms better to 24.0 ms worse.")
    faster = {"output_tokens_per_s": Call("output_tokens_per_s", None, "a", ("a", "b"), "b", 0.02, (-60.0, 24.0), "")}
    (text,) = sentences({"a": arm(output_tokens_per_s=100), "b": arm(output_tokens_per_s=98)}, faster)
    assert text.endswith("a may be anything from 24 tokens/s better to 60 tokens/s worse.")


def test_a_difference_that_is_certain_and_of_no_use_is_called_that():
    calls = {"ttft_ms.p99": Call("ttft_ms.p99", None, "a", ("a", "b"), "b", 0.002, (-0.4, -0.1), "")}
    (text,) = sentences({"a": arm(ttft_ms=ms(100)), "b": arm(ttft_ms=ms(100.2))}, calls)
    assert text.endswith("a is better by 0.1 ms to 0.4 ms, which is of no use to anybody.")


def test_a_router_that_is_clearly_behind_is_named_where_two_are_ahead():
    calls = {"ttft_ms.p99": Call("ttft_ms.p99", None, "a", ("a", "b"), "b", 0.02, (-60.0, 24.0), "")}
    routers = {name: arm(ttft_ms=ms(value)) for name, value in (("a", 100), ("b", 102), ("c", 400))}
    (text,) = sentences(routers, calls)
    assert text.endswith("Behind a beyond doubt: c.")


def test_two_winners_share_the_verdict():
    calls = won() | won("tpot_ms.p50", "b", "a")
    routers = {"a": arm(ttft_ms=ms(100), tpot_ms=ms(20)), "b": arm(ttft_ms=ms(200), tpot_ms=ms(10))}
    text = sentences(routers, calls)[0]
    assert "a wins TTFT p99" in text
    assert "b wins TPOT p50" in text


def test_one_router_has_nothing_to_beat():
    assert sentences({"a": arm()}, {}) == ["Only one router ran: there is nothing to compare."]
    assert "Fewer than two" in sentences({"a": arm(), "b": arm()}, {})[0]


def test_routers_that_did_the_same_are_said_to_be_equal():
    calls = {"ttft_ms.p99": Call("ttft_ms.p99", None, None, ("a", "b"), basis="equal")}
    assert sentences({"a": {**arm(), "requests_per_s": 1.0}, "b": {**arm(), "requests_per_s": 1.0}}, calls) == [
        "The routers did the same: every figure that counts is equal."
    ]


def test_routers_that_answered_nothing_are_not_called_equal():
    calls = {"errors": Call("errors", None, None, ("a", "b"), basis="equal")}
    (said,) = sentences({"a": {**arm(), "requests_per_s": None}, "b": {**arm(), "requests_per_s": None}}, calls)
    assert "nothing to compare" in said


def test_rollouts_put_the_rollout_first():
    routers = {
        "a": arm(step_makespan_ms=ms(9), ttft_ms=ms(1), session_e2e_ms=ms(5)),
        "b": arm(ttft_ms=ms(2), session_e2e_ms=ms(6)),
    }
    assert has_rollouts(routers)
    text = sentences(routers, won() | won("session_e2e_ms.p99"))[0]
    assert text.startswith("a wins session end to end p99 (5.0 ms against 6.0 ms of b, 50.0 % better")
    assert text.endswith(" and TTFT p99.")


def kinds(**changes):
    return [flag.kind for flag in flags({"a": arm(**changes)})]


def test_one_engine_that_takes_everything_is_degenerate():
    assert kinds(placement={"r0": 480, "r1": 0, "r2": 0}) == ["degenerate-placement"]
    assert kinds(placement={"r0": 91, "r1": 9}) == ["degenerate-placement"]
    assert kinds(placement={"r0": 90, "r1": 10}) == []
    assert kinds(placement={"r0": 480}) == []


def test_uneven_counts_matter_at_low_load_only():
    uneven = {"r0": 30, "r1": 2, "r2": 4, "r3": 4}
    assert kinds(placement=uneven, in_flight_mean=1.0) == ["uneven-placement"]
    assert kinds(placement=uneven, in_flight_mean=40.0) == []
    assert kinds(placement={"r0": 5, "r1": 0, "r2": 5, "r3": 2}, in_flight_mean=1.0) == []


def test_preemptions_warm_starts_phantoms_and_failures_are_flagged():
    assert kinds(preemptions=293) == ["preempted"]
    assert kinds(preemptions=0) == []
    assert kinds(hit_rate=0.6, hit_rate_ceiling=0.5) == ["warm-start"]
    assert kinds(hit_rate=0.5, hit_rate_ceiling=0.5) == []
    assert kinds(phantom_hit_points=25.0) == ["phantom-hits"]
    assert kinds(phantom_hit_points=-2.0) == []
    assert kinds(errors=1) == ["failures"]


def test_a_winner_that_lost_more_requests_is_told_to_have_in_the_same_sentence():
    routers = {"a": arm(ttft_ms=ms(100), incomplete=9), "b": arm(ttft_ms=ms(200), errors=1)}
    assert sentences(routers, won())[0].endswith(", though it lost 9 of 100 requests and b 1 of 100.")
    routers["b"]["errors"] = 9
    assert "lost" not in sentences(routers, won())[0]


def test_who_is_ahead_and_lost_clearly_more_wins_nothing():
    calls = {"ttft_ms.p99": Call("ttft_ms.p99", None, "a", ("a", "b"), "b", 0.5, (-120.0, -80.0), LOST_MORE)}
    routers = {"a": arm(ttft_ms=ms(100), incomplete=40), "b": arm(ttft_ms=ms(200))}
    assert sentences(routers, calls) == [
        "a is ahead in TTFT p99, but lost 40 of 100 requests and b 0 of 100: what is lost is in no time, "
        "so it wins none."
    ]


def test_figures_far_apart_that_are_too_close_to_call_are_explained():
    near = Call("tpot_ms.p50", None, "a", ("a", "b"), "b", 0.01, (-1.0, 1.0), "sessions")
    far = Call("ttft_ms.p50", None, "a", ("a", "b"), "b", 0.9, (-3_000.0, 900.0), "sessions")
    routers = {"a": arm(ttft_ms=ms(50), tpot_ms=ms(10)), "b": arm(ttft_ms=ms(2_000), tpot_ms=ms(10.1))}
    *_, text = sentences(routers, won("session_e2e_ms.p99") | {"tpot_ms.p50": near, "ttft_ms.p50": far})
    assert text == (
        "TTFT p50 is too close to call although a has 50.0 ms and b 2,000.0 ms: with other sessions a may be anything "
        "from 3,000.0 ms better to 900.0 ms worse, as a percentile jumps where requests are either fast or slow."
    )
    assert len(sentences(routers, won("session_e2e_ms.p99") | {"tpot_ms.p50": near})) == 2


@pytest.mark.parametrize(("basis", "told"), [("3 repeats", True), ("5 repeats", False), ("sessions and slices", False)])
def test_three_repeats_are_said_to_tell_little(basis, told):
    near = Call("tpot_ms.p50", None, "a", ("a", "b"), "b", 0.01, (-1.0, 1.0), basis)
    routers = {"a": arm(ttft_ms=ms(100), tpot_ms=ms(10)), "b": arm(ttft_ms=ms(200), tpot_ms=ms(10.1))}
    found = sentences(routers, won() | {"tpot_ms.p50": near})
    assert any("spread between 3 repeats" in text for text in found) is told


def test_a_belief_that_was_not_served_is_blamed_on_the_index_only_where_the_figures_say_so():
    def told(**figures):
        metrics = arm(phantom_hit_points=40.0, stale_placements=30, misbelieved_queue_ms=6_000.0, **figures)
        return flags({"a": metrics | {"believed_queue_ms": 20.0}})[0].text

    waited = told(belief_kept_at_once=0.97, belief_kept_after_wait=0.2)
    assert "waited 6,000.0 ms in the engines' queues on average, others 20.0 ms: it was evicted before" in waited
    assert "wrong when the router chose" in told(belief_kept_at_once=0.3, belief_kept_after_wait=0.2)
    assert told(belief_kept_at_once=0.97, belief_kept_after_wait=0.9).endswith("expected a hit and found nothing)")
    assert told().endswith("expected a hit and found nothing)")
