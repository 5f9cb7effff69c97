"""The keys of `[load]`: what a driver has no use for is refused with the mend, and defaults fill themselves in."""

import msgspec
import pytest

from harness.drive import SLOTS, Drive, Load, Stage, unaliased


def refused(**keys):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(keys, Load)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rate_per_s": 3}, "rate_per_s is for the open loop"),
        ({"driver": "requests", "stages": [{"rate_per_s": 1, "duration_s": 1}]}, "stages is for the open loop"),
        ({"burstiness": 0.5}, "burstiness is for the open loop"),
        ({"driver": "rate"}, "needs rate_per_s, stages, or arrival = 'trace'"),
        ({"driver": "rate", "rate_per_s": 0}, "give a finite rate above 0"),
        ({"driver": "rate", "rate_per_s": 1, "stages": [{"rate_per_s": 1, "duration_s": 1}]}, "both say how fast"),
        ({"driver": "rate", "arrival": "trace", "rate_per_s": 1}, "both say when sessions start"),
        ({"driver": "rate", "arrival": "trace", "ramp_s": 1}, "ramp_s and arrival = 'trace'"),
        ({"driver": "rate", "arrival": "poisson", "rate_per_s": 1, "burstiness": 2}, "write arrival = 'gamma'"),
        ({"driver": "rate", "stages": [{"rate_per_s": 0, "duration_s": 1}]}, "nothing would ever start"),
        (
            {"driver": "rate", "ramp_s": 9, "stages": [{"rate_per_s": 1, "duration_s": 2}]},
            "longer than the first stage",
        ),
        ({"driver": "rate", "rate_per_s": 1, "burstiness": -1}, "gamma shape above 0"),
        ({"concurrency": 0}, "at least 1 session slot"),
        ({"driver": "requests", "concurrency": 0}, "at least 1 request in flight"),
        ({"ramp_s": -1}, "ramp_s = -1"),
        ({"drain_s": -1}, "leave it out for no limit"),
        ({"processes": 0}, "at least 1 is needed"),
        ({"concurrency": 2, "processes": 3}, "ask for fewer processes"),
        ({"driver": "rate", "stages": [{"rate_per_s": 1, "duration_s": 0}]}, "lasts longer than 0 s"),
        ({"concurrency": 10**9}, "no workload has more than 1,000,000 sessions"),
        ({"ramp_s": float("nan")}, "ramp_s = nan: from 0"),
        ({"warmup_s": float("inf")}, "warmup_s = inf: from 0"),
        ({"drain_s": float("nan")}, "drain_s = nan: give a time from 0"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s = inf: from above 0"),
        ({"driver": "rate", "stages": [{"rate_per_s": 1, "duration_s": 1e12}]}, "at most 1e+09"),
    ],
)
def test_what_cannot_work_says_why_and_what_to_change(keys, says):
    assert says in refused(**keys)


def test_defaults_fill_themselves_in_and_come_back_the_same():
    closed, open_ = Load(), Load(driver="rate", rate_per_s=2.0)
    assert (closed.concurrency, closed.slots, closed.arrival) == (SLOTS, SLOTS, None)
    assert (open_.concurrency, open_.slots, open_.arrival) == (None, None, "poisson")
    assert Load(driver="rate", rate_per_s=2.0, burstiness=0.5).arrival == "gamma"
    for load in (closed, open_):
        assert msgspec.convert(msgspec.to_builtins(load), Load) == load


def test_a_driver_alone_is_the_drivers_part_of_a_load():
    load = Load(driver="rate", rate_per_s=2.0, model="m", processes=2)
    assert Drive(**load.drive()).rate_per_s == 2.0
    assert "model" not in load.drive()


def test_names_of_vllms_benchmark_are_understood_and_not_doubled():
    assert unaliased({"request_rate": 4, "max_concurrency": 9}) == {"rate_per_s": 4, "concurrency": 9}
    with pytest.raises(ValueError, match="both given: keep rate_per_s"):
        unaliased({"rate_per_s": 1, "request_rate": 4})


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (Load(), "16 session slots"),
        (Load(driver="requests", concurrency=3), "at most 3 requests in flight"),
        (Load(driver="rate", rate_per_s=2.5), "an open loop (poisson): 2.5 sessions a second"),
        (Load(driver="rate", arrival="trace", concurrency=4), "instants of their own, at most 4 requests in flight"),
        (
            Load(driver="rate", stages=(Stage(rate_per_s=1, duration_s=1), Stage(rate_per_s=5, duration_s=1))),
            "1, then 5",
        ),
    ],
)
def test_a_driver_says_what_it_is_in_a_few_words(load, says):
    assert says in load.describe()
