"""Figures come from raw rows: how many load processes wrote them changes none, and no rounding hides a difference."""

import msgspec
import pytest

from harness.arm import Arm
from harness.merge import merge_rows
from harness.scenario import check_scenario
from reports import arm_metrics, fleet_frame, requests_frame
from workloads import Streams

TTFT_US = {"a": 1_040_000, "b": 1_049_000}
"""Locust's own table would call both 1000 ms."""


def scenario():
    return check_scenario(
        {
            "name": "figures",
            "routers": [{"name": name, "policy": "round-robin"} for name in TTFT_US],
            "engine": {"preset": "llama-3.1-8b-h100"},
            "workload": {"kind": "uniform-unique", "requests": 120, "input_tokens": 32, "output_tokens": 4},
        },
        "a test",
    )


def load_rows(asked, ttft_us):
    """Requests a tenth of a second apart, whose last token comes 30 ms after the first, and later the later it is."""
    for number, session in enumerate(asked.make_workload().sessions(Streams(asked.seed))):
        sent = 1_000_000 + number * 100_000
        first = sent + ttft_us
        yield {
            "request_id": f"{session.session_id}-0", "session": session.session_id, "turn": 0,
            "group": None, "rollout_step": None,
            "scheduled_us": sent - 50, "sent_us": sent, "first_token_us": first, "second_token_us": first + 10_000,
            "last_token_us": first + 30_000 + 70 * number, "end_us": first + 31_000 + 70 * number, "phase": "steady",
            "prompt_tokens": 32, "output_tokens": 4, "cached_tokens": 0, "token_source": "usage",
            "chunk_gaps_us": [10_000, 10_000, 10_000 + 70 * number], "status": "ok",
        }  # fmt: skip


def figures(folder, router, processes):
    """The metrics of an arm whose rows so many processes wrote."""
    folder.mkdir()
    asked = scenario()
    rows = list(load_rows(asked, TTFT_US[router]))
    for rank in range(processes):
        lines = [msgspec.json.encode(row) for row in rows[rank::processes]]
        (folder / f"locust-{100 + rank}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    arm = Arm(asked, next(entry for entry in asked.routers if entry.name == router), 0)
    merged = merge_rows(arm, folder, {})
    return arm_metrics(requests_frame(merged.requests), fleet_frame(merged.fleet), slo={}, replicas=asked.fleet.names)


@pytest.mark.parametrize("router", TTFT_US)
def test_one_process_and_four_give_the_same_figures(tmp_path, router):
    assert figures(tmp_path / "one", router, 1) == figures(tmp_path / "four", router, 4)


def test_nine_milliseconds_between_two_routers_are_nine_milliseconds(tmp_path):
    a, b = (figures(tmp_path / router, router, 4)["ttft_ms"] for router in TTFT_US)
    for figure in ("p50", "p90", "p99", "max"):
        assert b[figure] - a[figure] == pytest.approx(9.0)
        assert a["max"] >= a["p99"] >= a["p50"]
