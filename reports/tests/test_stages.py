from reports import finish_run, read_run
from reports.tests.rows_by_hand import MS, request
from reports.tests.synthetic import header

LOAD = {"driver": "rate", "stages": [{"rate_per_s": 10, "duration_s": 2.0}, {"rate_per_s": 50, "duration_s": 1.0}]}


def open_loop(folder, *, delay_ms=0, routers=("a", "b"), load=LOAD):
    """20 requests at 10 a second, then 50 at 50 a second; those of `b` fall behind by `delay_ms` each in stage 2."""
    rows = []
    for router in routers:
        for n in range(70):
            due_ms = 100 * n if n < 20 else 2_000 + 20 * (n - 20)
            late_ms = delay_ms * max(0, n - 20) if router == "b" else 0
            sent, ttft_ms = (due_ms + late_ms) * MS, 100 if n < 20 else 900
            rows.append(
                request(n, router=router, session=f"s{n}", scheduled_us=due_ms * MS, sent_us=sent)
                | {
                    "first_token_us": sent + ttft_ms * MS,
                    "last_token_us": sent + 1_000 * MS,
                    "end_us": sent + 1_000 * MS,
                }
                | {"second_token_us": None}
            )
    return finish_run(folder, header(scenario={"name": "stages", "load": load}), rows, [])


def test_every_stage_says_what_was_asked_and_what_was_sent(tmp_path):
    run = open_loop(tmp_path)
    assert [(each["router"], each["stage"], each["requests"], each["valid"]) for each in run.stages] == [
        ("a", 1, 20, True),
        ("a", 2, 50, True),
        ("b", 1, 20, True),
        ("b", 2, 50, True),
    ]
    assert run.health["verdict"] == "ok"
    assert read_run(tmp_path).stages == run.to_json()["stages"]
    assert "| stage 2 (50 sessions/s) | b | 50 | 51.02 | 51.02 | 0.0 | 0.0 | as asked |" in (
        tmp_path / "report.md"
    ).read_text("utf-8")


def test_a_stage_that_fell_behind_is_left_out_of_every_arm(tmp_path):
    run = open_loop(tmp_path, delay_ms=40)
    assert [each["valid"] for each in run.stages] == [True, True, True, False]
    assert {name: metrics["requests"] for name, metrics in run.routers.items()} == {"a": 20, "b": 20}
    assert run.routers["a"]["ttft_ms"]["max"] == 100
    assert set(run.requests["phase"]) == {"steady", "off-rate"}
    assert run.health["verdict"] == "degraded"
    assert run.health["reasons"][0].startswith(
        "stage 2 (50 sessions/s) is left out of every figure: b sent 33.3 % of its rate, 1,960 ms late"
    )


def test_where_no_stage_was_sent_as_asked_the_run_is_invalid(tmp_path):
    one = {"driver": "rate", "stages": [{"rate_per_s": 20, "duration_s": 9.0}]}
    run = open_loop(tmp_path, delay_ms=40, routers=("b",), load=one)
    assert run.health["verdict"] == "invalid"
    assert "b: no stage was sent at its rate" in run.health["reasons"][0]


def test_a_closed_loop_has_no_stages(tmp_path):
    assert not open_loop(tmp_path, load={"driver": "sessions"}).stages
    assert '"stages": [' not in (tmp_path / "run.json").read_text("utf-8")


def test_a_load_of_one_rate_that_fell_behind_is_invalid_and_its_slowest_arm_is_named(tmp_path):
    """Asked for 28 a second over 2.98 s; the last of `b` was sent 1.96 s late."""
    one = {"driver": "rate", "rate_per_s": 28.0}
    kept = open_loop(tmp_path / "kept", load=one)
    assert (kept.health["verdict"], len(kept.stages)) == ("ok", 2)
    run = open_loop(tmp_path / "late", delay_ms=40, load=one)
    assert run.health["verdict"] == "invalid"
    assert run.health["reasons"][0].startswith("b: 14.17 requests/s were sent where 23.49 were asked (bound 95%)")
    assert run.routers["b"]["requests"] == 70
