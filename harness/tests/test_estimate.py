"""What a scenario will take, told before it runs: whole where the trial is whole, extrapolated where it is not."""

import pytest

from harness.arm import Arm
from harness.census import census
from harness.check_command import estimate_lines
from harness.cli import run_cli
from harness.estimate import Estimate, Trial, estimate, trial
from harness.scenario import load_scenario
from harness.sim import Simulation

PATIENT_S = 1000.0


def test_a_whole_trial_is_the_arm_itself():
    scenario = load_scenario("quickstart", routers=["session-ring"])
    counted = census(scenario, scenario.seed)
    found = trial(scenario, scenario.routers[0], counted, PATIENT_S)
    rows = Simulation(Arm(scenario, scenario.routers[0], 0)).run().requests
    assert found.share == 1.0
    assert found.model_s == max(row["end_us"] for row in rows) / 1e6
    assert found.requests_per_s * found.model_s == pytest.approx(len(rows))
    assert found.tokens_per_s * found.model_s == pytest.approx(counted.output_tokens, rel=0.02)  # rounded by second
    assert found.in_flight <= found.in_flight_peak <= scenario.load.concurrency


def test_a_trial_that_is_broken_off_goes_on_as_it_began():
    scenario = load_scenario("quickstart", routers=["round-robin"], overrides=["workload.sessions=300"])
    counted = census(scenario, scenario.seed)
    whole = trial(scenario, scenario.routers[0], counted, PATIENT_S)
    part = trial(scenario, scenario.routers[0], counted, 0.0)
    assert part.share < 0.1
    assert whole.model_s / 2 < part.model_s < whole.model_s * 2


def test_a_router_outside_virtual_time_is_taken_for_round_robin():
    overrides = ["routers=[{name='mine', command=['my-router', '{port}']}]"]
    scenario = load_scenario("quickstart", overrides=overrides)
    plain = load_scenario("quickstart", routers=["round-robin"])
    (found,), (expected,) = estimate(scenario).trials, estimate(plain).trials
    assert found.router == "mine"
    assert found.model_s == expected.model_s


def test_repeats_and_routers_add_up():
    one = estimate(load_scenario("quickstart", routers=["round-robin"], repeats=1))
    three = estimate(load_scenario("quickstart", routers=["round-robin"], repeats=3))
    assert 2 < three.live_s / one.live_s < 3  # the reports are written once
    assert one.processes == three.processes == 4 + 1 + 1


def test_more_than_the_cores_stream_is_said():
    few, many = (
        Estimate((Trial("r", 1.0, 60.0, 1.0, 20.0, 30, 10.0, tokens, tokens, 10),), 60.0, 2.0, 500.0, 200.0, 6)
        for tokens in (300.0, 30_000.0)
    )
    assert not any(line.startswith("!") for line in estimate_lines(few, 2, "mine"))
    assert "routebench doctor mine" in estimate_lines(many, 2, "mine")[-1]


def test_check_prints_time_memory_and_load_of_both_modes(capsys):
    assert run_cli(["check", "quickstart"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("requests in flight (peak", "output tokens/s", "--mode sim: about", "--mode live: about", "MiB"):
        assert words in said
