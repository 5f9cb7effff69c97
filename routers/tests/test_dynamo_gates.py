"""The gates before Dynamo's cost: the queue, pinned and allowed workers, busy thresholds, overrides, session homes."""

import random

import msgspec
import pytest

from routers import (
    EngineMetrics,
    HashedPrompt,
    NoReplica,
    OptionError,
    Router,
    Signal,
    Stored,
    TurnView,
    make_policy,
)
from routers.hashing import PrefixKeys
from routers.policies.dynamo_options import DynamoKvOptions
from routers.sequences import RouteGuesses

BLOCK = 16


def turn(request_id, blocks=10, first=0, session=None, **wishes):
    headers = {"x-dynamo-select": msgspec.json.encode(wishes).decode()} if wishes else None
    prompt = HashedPrompt(blocks * BLOCK, range(first + 1, first + blocks + 1), BLOCK)
    return TurnView(request_id=request_id, prompt=prompt, session_id=session, headers=headers)


def router(replicas=("r0",), **options):
    return Router(make_policy("dynamo-kv", options, random.Random(1)), replicas)


class Answers(dict):
    def to(self, request_id):
        def placed(found):
            self[request_id] = found

        return placed


def submit_all(fleet, turns, at_us=None):
    answers = Answers()
    for place, one in enumerate(turns):
        fleet.submit(one, at_us[place] if at_us else place, answers.to(one.request_id))
    return answers


def store(fleet, replica, blocks, first=0):
    contents = tuple(range(first + 1, first + blocks + 1))
    fleet.kv_events(replica, [Stored(contents, None, contents, BLOCK)], 0)


# -- the queue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("owed_blocks", "waits"), [(9, False), (10, False), (11, True)])
def test_a_replica_is_busy_above_its_threshold_and_not_at_it(owed_blocks, waits):
    fleet = router(queue_threshold=0.5, max_num_batched_tokens=320)
    answers = submit_all(fleet, [turn("a", owed_blocks), turn("b", first=100)])
    assert ("b" not in answers) is waits
    assert fleet.waiting == waits


def test_nobody_is_ever_busy_where_no_worker_said_its_budget():
    fleet = router(queue_threshold=0.5)
    answers = submit_all(fleet, [turn(f"q{i}", 10_000, first=10_000 * i) for i in range(30)])
    assert len(answers) == 30


def test_without_a_threshold_nothing_waits():
    assert not router().may_hold
    assert len(submit_all(router(), [turn(f"q{i}", 50, first=50 * i) for i in range(9)])) == 9


def test_a_turn_waits_only_while_all_replicas_are_busy():
    fleet = router(("r0", "r1"), queue_threshold=0.0, max_num_batched_tokens=100)
    answers = submit_all(fleet, [turn("a"), turn("b", first=50), turn("c", first=100)])
    assert set(answers) == {"a", "b"}
    fleet.first_token("b", 5000)
    assert answers["c"].replica == answers["b"].replica
    assert answers["c"].reason.startswith("held 5.0 ms; lowest cost")


@pytest.mark.parametrize("end", ["first_token", "finished", "failed"])
def test_whatever_ends_a_prefill_lets_the_next_one_go(end):
    fleet = router(queue_threshold=0.0, max_num_batched_tokens=100)
    answers = submit_all(fleet, [turn("a"), turn("b", first=50), turn("c", first=100)])
    arguments = ("a", 1, 10) if end == "finished" else ("a", 10)
    getattr(fleet, end)(*arguments)
    assert "b" in answers
    assert "c" not in answers
    assert (fleet.counts.held, fleet.waiting, fleet.in_flight) == (2, 1, 2 if end == "first_token" else 1)


@pytest.mark.parametrize(
    ("options", "wishes", "expected"),
    [
        ({}, {}, ["q0", "q1", "q2"]),
        ({"queue_policy": "lcfs"}, {}, ["q2", "q1", "q0"]),
        ({}, {"q2": {"priority_jump": 5.0}}, ["q2", "q0", "q1"]),
        ({}, {"q2": {"priority_jump": -5.0}}, ["q0", "q1", "q2"]),  # a negative jump is none
        ({}, {"q1": {"strict_priority": 1}, "q2": {"priority_jump": 50.0}}, ["q1", "q2", "q0"]),
        ({"queue_policy": "lcfs"}, {"q0": {"strict_priority": 1}}, ["q0", "q2", "q1"]),
    ],
)
def test_the_order_of_the_queue_is_strict_priority_then_jump_and_arrival(options, wishes, expected):
    fleet = router(queue_threshold=0.0, max_num_batched_tokens=100, **options)
    turns = [turn("first")] + [turn(f"q{i}", first=50 * (i + 1), **wishes.get(f"q{i}", {})) for i in range(3)]
    answers = submit_all(fleet, turns, [0, 1_000_000, 2_000_000, 3_000_000])
    for name in ["first", *expected]:
        fleet.first_token(name, 4_000_000)
    assert list(answers) == ["first", *expected]


def test_wspt_lets_the_least_uncached_prompt_go_first():
    fleet = router(queue_threshold=0.0, max_num_batched_tokens=100, queue_policy="wspt")
    store(fleet, "r0", 19, first=200)
    turns = [turn("first"), turn("long", 12, 50), turn("short", 4, 100), turn("cached", 20, 200)]
    answers = submit_all(fleet, turns)
    for name in ("first", "cached", "short"):
        fleet.first_token(name, 10)
    assert list(answers) == ["first", "cached", "short", "long"]


def test_the_head_keeps_everybody_behind_it_waiting():
    """Its one allowed replica is busy, so a turn that could go elsewhere waits as well."""
    fleet = router(("r0", "r1"), queue_threshold=0.0, max_num_batched_tokens=100)
    pinned = [turn("a", pinned_worker="r0"), turn("b", first=50, pinned_worker="r0")]
    answers = submit_all(fleet, [*pinned, turn("c", first=100)])
    assert set(answers) == {"a"}
    fleet.first_token("a", 10)
    assert answers["b"].replica == "r0"
    assert answers["c"].replica == "r1"


@pytest.mark.parametrize(("waited_us", "believed"), [(9_000_000, 0), (11_000_000, 8 * BLOCK)])
def test_a_turn_is_matched_anew_only_after_ten_seconds_of_waiting(waited_us, believed):
    fleet = router(queue_threshold=0.0, max_num_batched_tokens=100)
    answers = submit_all(fleet, [turn("a", 10, 500), turn("b")])
    store(fleet, "r0", 8)
    fleet.first_token("a", 1 + waited_us)
    assert answers["b"].believed_hit_tokens == believed


def test_a_turn_that_is_given_up_leaves_the_queue_and_nothing_behind():
    fleet = router(queue_threshold=0.0, max_num_batched_tokens=100)
    answers = submit_all(fleet, [turn("a"), turn("b", first=50), turn("c", first=100)])
    assert fleet.knows("b")
    fleet.failed("b", 5)
    assert not fleet.knows("b")
    fleet.first_token("a", 6)
    assert set(answers) == {"a", "c"}
    assert (fleet.counts.withdrawn, fleet.counts.failed, fleet.waiting) == (1, 0, 0)
    assert not fleet.policy._waiting


def test_a_replica_that_joins_takes_what_waits_and_one_that_leaves_makes_no_room():
    fleet = router(queue_threshold=0.0, max_num_batched_tokens=100)
    answers = submit_all(fleet, [turn("a"), turn("b", first=50), turn("c", first=100)])
    fleet.add_replica("r1", 10)
    assert answers["b"].replica == "r1"
    fleet.remove_replica("r0", 20)
    assert "c" not in answers
    fleet.first_token("b", 30)
    assert answers["c"].replica == "r1"


def test_the_queue_of_an_empty_fleet_ends_in_no_replica():
    fleet = router(queue_threshold=0.0, max_num_batched_tokens=100)
    answers = submit_all(fleet, [turn("a"), turn("b", first=50)])
    fleet.remove_replica("r0", 10)
    assert isinstance(answers["b"], NoReplica)
    assert fleet.waiting == 0


# -- who may have it -------------------------------------------------------------------------------------------------


def test_a_pinned_request_goes_to_its_replica_without_decay():
    fleet = router(("r0", "r1"), overlap_score_credit_decay=1.0)
    store(fleet, "r0", 6)
    fleet.route(turn("a", 40, 500, pinned_worker="r0"), 0)
    pinned = fleet.route(turn("b", pinned_worker="r0"), 1)
    assert (pinned.replica, pinned.rule) == ("r0", "pinned")
    assert pinned.scores == {"r0": pytest.approx((640 + 160) / BLOCK - 6 + 40 + 10)}


def test_only_allowed_workers_are_considered_and_none_of_them_is_an_error():
    fleet = router(("r0", "r1", "r2"))
    chosen = {fleet.route(turn(f"q{i}", first=50 * i, allowed_worker_ids=["r1", "r2"]), i).replica for i in range(6)}
    assert chosen == {"r1", "r2"}
    with pytest.raises(NoReplica, match="r9"):
        fleet.route(turn("x", allowed_worker_ids=["r9"]), 9)
    assert fleet.counts.no_replica == 1


@pytest.mark.parametrize(
    ("options", "blocks", "busy"),
    [
        ({"active_prefill_tokens_threshold": 160}, 10, False),
        ({"active_prefill_tokens_threshold": 159}, 10, True),
        ({"active_prefill_tokens_threshold_frac": 0.5, "max_num_batched_tokens": 320}, 10, False),
        ({"active_prefill_tokens_threshold_frac": 0.5, "max_num_batched_tokens": 318}, 10, True),
        ({"active_decode_blocks_threshold": 0.5, "total_kv_blocks": 20}, 10, False),
        ({"active_decode_blocks_threshold": 0.5, "total_kv_blocks": 19}, 10, True),
    ],
)
def test_a_replica_above_a_busy_threshold_takes_nothing_and_all_above_is_an_error(options, blocks, busy):
    fleet = router(("r0",), **options)
    fleet.route(turn("a", blocks), 0)
    if not busy:
        assert fleet.route(turn("b", first=50), 1).replica == "r0"
        return
    with pytest.raises(NoReplica, match="above a busy threshold"):
        fleet.route(turn("b", first=50), 1)
    fleet.finished("a", 1, 2)
    assert fleet.route(turn("b", first=50), 3).replica == "r0"


def test_blocks_that_the_engine_reports_count_like_those_that_are_owed():
    fleet = router(("r0", "r1"), active_decode_blocks_threshold=0.5, total_kv_blocks=1000)
    assert Signal.ENGINE_METRICS in fleet.needs
    fleet.metrics("r0", EngineMetrics(running=1, waiting=0, kv_usage=0.6), 0)
    assert {fleet.route(turn(f"q{i}", first=50 * i), i).replica for i in range(5)} == {"r1"}


# -- a request's own wishes ------------------------------------------------------------------------------------------


def test_a_request_overrides_the_credit_the_scale_and_the_temperature_for_itself_alone():
    fleet = router(("r0", "r1"))
    store(fleet, "r0", 6)
    assert fleet.route(turn("a"), 0).scores == {"r0": 14.0, "r1": 20.0}
    fleet.finished("a", 1, 1)
    bare = fleet.route(turn("b", router_config_override={"overlap_score_credit": 0.0}), 2)
    assert bare.scores == {"r0": 20.0, "r1": 20.0}
    fleet.finished("b", 1, 3)
    heavy = fleet.route(turn("c", router_config_override={"prefill_load_scale": 2.0, "router_temperature": 1.0}), 4)
    assert heavy.scores == {"r0": 18.0, "r1": 30.0}
    assert heavy.rule == "softmax"
    fleet.finished("c", 1, 5)
    assert fleet.route(turn("d"), 6).scores == {"r0": 14.0, "r1": 20.0}


def test_an_override_of_the_decay_is_read_and_has_no_effect():
    fleet = router(("r0", "r1"))
    store(fleet, "r0", 6)
    fleet.route(turn("a", 40, 500, pinned_worker="r0"), 0)
    plain = fleet.route(turn("b", router_config_override={"overlap_score_credit_decay": 1.0}), 1).scores
    assert plain["r0"] == pytest.approx(50 - 6 + 50)


def test_what_a_request_overrides_holds_for_its_booking_too():
    fleet = router(("r0",))
    for name in ("a", "b"):
        fleet.route(turn(name, router_config_override={"assume_kv_reuse": False, "track_prefill_tokens": False}), 0)
    assert fleet.policy.owed("r0") == (0, 20)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"router_config_override": {"host_cache_hit_weight": 1}}, "cannot be overridden"),
        ({"router_config_override": {"shared_cache_multiplier": 1}}, "is not built"),
        ({"router_config_override": {"router_temperature": -1}}, "temperature=-1"),
        ({"router_config_override": {"router_temperature": "hot"}}, "temperature"),
        ({"routing_constraints": {}}, "X-Dynamo-Select"),
        ({"pinned_worker": 4}, "X-Dynamo-Select"),
    ],
)
def test_a_wish_that_cannot_be_followed_is_an_error_that_names_it(wishes, words):
    with pytest.raises(OptionError, match=words):
        router().route(turn("a", **wishes), 0)


# -- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_stays_at_home_until_it_was_idle_too_long():
    fleet = router(("r0", "r1"), session_affinity_ttl_s=10.0)
    assert Signal.SESSION_ID in fleet.needs
    home = fleet.route(turn("a", 10, session="s"), 0).replica
    other = ({"r0", "r1"} - {home}).pop()
    store(fleet, other, 10)
    fleet.finished("a", 1, 1)
    assert fleet.route(turn("b", 10, session="s"), 10_000_000).replica == home
    fleet.finished("b", 1, 10_000_001)
    assert fleet.route(turn("c", 10, session="s"), 20_000_001).replica == other


def test_a_failure_ends_a_sessions_stay_and_so_does_its_replicas_leaving():
    fleet = router(("r0", "r1"), session_affinity_ttl_s=10.0)
    home = fleet.route(turn("a", session="s"), 0).replica
    other = ({"r0", "r1"} - {home}).pop()
    store(fleet, other, 10)
    fleet.failed("a", 1)
    assert fleet.route(turn("b", session="s"), 2).replica == other
    fleet.remove_replica(other, 3)
    assert fleet.route(turn("c", session="s"), 4).replica == home


def test_the_header_of_dynamo_names_the_session_before_any_other():
    fleet = router(("r0", "r1"), session_affinity_ttl_s=10.0)

    def asks(name, header, session):
        prompt = HashedPrompt(160, range(1, 11), BLOCK)
        return TurnView(request_id=name, prompt=prompt, session_id=session, headers={"x-dynamo-session-id": header})

    home = fleet.route(asks("a", "one", "x"), 0).replica
    assert fleet.route(asks("b", "one", "y"), 1).replica == home
    assert fleet.route(asks("c", "one", "z"), 2).rule == "pinned"


# -- knobs -----------------------------------------------------------------------------------------------------------


def test_lmetric_multiplies_what_is_left_of_prefill_with_decode_and_one():
    fleet = router(("r0", "r1"), cost_policy="lmetric")
    store(fleet, "r0", 6)
    assert fleet.route(turn("a"), 0).scores == {"r0": 4 * 11, "r1": 10 * 11}


@pytest.mark.parametrize("name", sorted(DynamoKvOptions.refused))
def test_a_knob_that_is_not_built_is_refused_with_the_reason(name):
    with pytest.raises(OptionError, match="has no option") as caught:
        make_policy("dynamo-kv", {name: 1})
    assert DynamoKvOptions.refused[name][:20] in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"active_decode_blocks_threshold": 0.9},
        {"active_prefill_tokens_threshold_frac": 0.9},
        {"prune_target_ratio": 1.5},
        {"queue_threshold": -1.0},
        {"max_num_batched_tokens": 0},
        {"queue_policy": "edf"},
    ],
)
def test_options_that_cannot_work_alone_or_at_all_are_errors(options):
    with pytest.raises(OptionError):
        make_policy("dynamo-kv", options)


def test_guesses_above_their_cap_are_cut_to_the_target_oldest_first():
    guesses = RouteGuesses(100.0, blocks_max=100, prune_to=0.8)
    prompts = [PrefixKeys(range(1000 * i, 1000 * i + 10)) for i in range(11)]
    for i in range(10):
        guesses.routed("r0", prompts[i], i)
    assert guesses.blocks() == 100
    guesses.routed("r0", prompts[0], 10)  # refreshed, so the second is the oldest now
    guesses.routed("r0", prompts[10], 11)
    assert guesses.blocks() == 80
    assert guesses.match(prompts[0]) == guesses.match(prompts[10]) == {"r0": 10}
    assert guesses.match(prompts[1]) == {}
