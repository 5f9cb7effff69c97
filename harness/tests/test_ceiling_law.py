"""No run hits more than one endless cache would have, whatever fails in it: both are over the same requests."""

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.ceiling import ceiling_of
from harness.sim import Simulation
from harness.tests.arms import arm, small
from reports import arm_metrics, fleet_frame, requests_frame

ROUTERS = ["round-robin", "session-ring", "dynamo-kv"]
crashes = st.lists(
    st.tuples(st.sampled_from(["r0", "r1", "r2"]), st.floats(0, 3), st.sampled_from(["crash", "drain"])),
    max_size=2,
    unique_by=lambda each: each[0],
)


def figures(one, rows):
    return arm_metrics(
        requests_frame(rows.requests), fleet_frame(rows.fleet), ceiling_cached_tokens=rows.ceiling_cached_tokens
    )


@settings(max_examples=40, deadline=None)
@given(
    router=st.integers(0, len(ROUTERS) - 1),
    seed=st.integers(0, 1_000),
    gone=crashes,
    timeout_s=st.floats(0.05, 2),
    blocks=st.sampled_from([100, 150, 400, 20_000]),
    warmup=st.integers(0, 4),
    slots=st.integers(1, 12),
)
def test_no_run_hits_more_than_its_ceiling_whatever_fails(router, seed, gone, timeout_s, blocks, warmup, slots):
    scenario = small(
        routers=ROUTERS,
        seed=seed,
        engine={"num_gpu_blocks": blocks},
        load={"concurrency": slots, "request_timeout_s": timeout_s, "warmup_sessions": warmup},
        churn=[{"at_s": at_s, "do": do, "replica": name} for name, at_s, do in sorted(gone, key=lambda each: each[1])],
    )
    one = arm(scenario, router)
    found = figures(one, Simulation(one).run())
    if found["hit_rate"] is not None:
        assert found["hit_rate"] <= found["hit_rate_ceiling"]
        assert found["redundant_prefill_tokens"] >= 0


def test_what_failed_requests_left_in_the_engines_counts_for_the_ceiling():
    """With a cache that keeps all, the one replica hits what its ceiling says although half of the requests fail."""
    scenario = small(
        fleet={"replicas": 1}, engine={"num_gpu_blocks": 20_000}, load={"concurrency": 1, "request_timeout_s": 0.4}
    )
    one = arm(scenario)
    rows = Simulation(one).run()
    done = [row for row in rows.requests if row["status"] == "ok"]
    assert len(done) < len(rows.requests) - 4
    assert sum(row["cached_tokens"] for row in done) == rows.ceiling_cached_tokens > ceiling_of(one, done)[0]


def test_a_success_that_does_not_tell_its_cached_tokens_is_in_neither_rate():
    one = arm(small())
    rows = Simulation(one).run()
    hidden = [row | {"cached_tokens": None} if row["turn"] else row for row in rows.requests]
    rows.requests, (rows.ceiling_cached_tokens, _) = hidden, ceiling_of(one, hidden)
    found = figures(one, rows)
    assert 0 < found["hit_rate"] <= found["hit_rate_ceiling"] < 0.5
