from reports.load_line import load_line
from reports.tests.rows_by_hand import MS, metrics_of, request
from reports.tests.runs_by_hand import run_of


def held(count, each_ms):
    """`count` requests after each other."""
    return metrics_of(
        [
            request(
                n, sent_us=n * each_ms * MS, first_token_us=n * each_ms * MS + 1, last_token_us=(n + 1) * each_ms * MS
            )
            | {"end_us": (n + 1) * each_ms * MS}
            for n in range(count)
        ]
    )


def line(scenario, **routers):
    return load_line(run_of(routers, scenario=scenario))


def test_asked_and_measured_stand_beside_each_other():
    text = line(
        {
            "load": {"driver": "sessions", "concurrency": 1000},
            "workload": {"think_time_ms": {"low": 500, "high": 1000}},
        },
        a=held(20, 100),
    )
    assert text == (
        "sessions driver (closed loop), 1000 slots, think time 500 to 1000 ms (uniform); "
        "measured 1 in flight (peak 1), 10.0 requests/s"
    )


def test_routers_that_differ_give_a_span():
    text = line({"load": {"concurrency": 4, "ramp_s": 1.5}}, a=held(20, 100), b=held(20, 50))
    assert text == "4 slots, ramp 1.5 s; measured 1 in flight (peak 1), 10.0 to 20.0 requests/s"


def test_an_open_loop_is_named_with_its_rates_in_sessions_a_second():
    load = {"driver": "rate", "arrival": "poisson", "rate_per_s": 2.5, "concurrency": 64, "stages": []}
    assert line({"load": load}) == (
        "rate driver (open loop, poisson), 2.5 sessions/s asked, 64 requests in flight at most"
    )
    stages = {
        "driver": "rate",
        "arrival": "poisson",
        "rate_per_s": None,
        "stages": [{"rate_per_s": 5.0}, {"rate_per_s": 10}],
    }
    assert line({"load": stages}) == "rate driver (open loop, poisson), 5, then 10 sessions/s asked"


def test_a_distribution_is_written_with_its_parameters():
    think = {"dist": "lognormal", "mean": 300, "sigma": 0.5, "max": None}
    assert line({"workload": {"think_time_ms": think}}) == "think time lognormal (mean 300, sigma 0.5) ms"
    assert line({"workload": {"think_time_ms": 40.0}}) == "think time 40 ms"


def test_nothing_known_is_nothing_said():
    assert line({}) == ""
