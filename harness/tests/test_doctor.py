"""The climb that says what this machine carries: how it is judged, what is advised, what it leaves behind."""

import json

import psutil
import pytest

from harness.arm import Arm, ArmRows
from harness.cli import run_cli
from harness.doctor import STEP_S, Diagnosis, StepFound, climb_of, diagnose, highest, mend, verdict_lines
from harness.estimate import Trial
from harness.planned import planned
from harness.scenario import builtin_names, load_scenario
from workloads import Streams


def step(tokens, verdict="ok", streams=None):
    return StepFound(tokens / 32, tokens, tokens, streams or tokens / 40, 1.0, 1.0, verdict, ("why",))


def trial(tokens):
    return Trial("r", 1.0, 10.0, 1.0, tokens / 40, 30, tokens / 32, tokens, tokens * 1.5, 100)


def diagnosis(verdicts, asked=None):
    steps = tuple(step(100 * 2**n, verdict) for n, verdict in enumerate(verdicts))
    return Diagnosis(steps, highest(steps, ("ok",)), highest(steps, ("ok", "degraded")), asked and trial(asked))


@pytest.mark.parametrize(
    ("verdicts", "best"),
    [
        (["ok", "ok", "ok"], 400),
        (["degraded", "ok", "degraded", "degraded", "ok"], 200),
        (["ok", "degraded", "ok", "invalid"], 400),
        (["degraded", "degraded", "ok"], None),
    ],
)
def test_one_bad_step_may_be_chance_and_two_are_the_end(verdicts, best):
    found = diagnosis(verdicts).carried
    assert (found and found.tokens_per_s_asked) == best


@pytest.mark.parametrize(("asked", "fits"), [(150, "well"), (300, "degraded"), (900, "no")])
def test_a_scenario_fits_well_or_badly_or_not(asked, fits):
    found = diagnosis(["ok", "ok", "degraded", "invalid", "invalid"], asked)
    assert found.fits == fits
    said = "\n".join(verdict_lines(found, load_scenario("quickstart"), named=True))
    assert ("it fits" in said) == (fits != "no")
    assert ("--set load.concurrency=" in said) == (fits != "well")


def test_the_advice_asks_for_no_more_than_was_carried():
    found = diagnosis(["ok", "ok", "invalid", "invalid"], 600)
    assert mend(found, load_scenario("quickstart")).startswith("--set load.concurrency=12,")
    paced = load_scenario("quickstart", overrides=["load={driver='rate', rate_per_s=6.0}"])
    assert mend(found, paced).startswith("--set load.rate_per_s=2,")
    staged = load_scenario("prefix-burst")
    assert "sim" in mend(diagnosis(["degraded", "invalid"], 600), staged)


@pytest.mark.parametrize("name", builtin_names())
def test_every_scenario_can_be_climbed_with_requests_like_its_own(name):
    scenario = load_scenario(name)
    climb = climb_of(scenario)
    assert climb.fleet.replicas == scenario.fleet.replicas
    sessions = list(planned(climb.make_workload(), climb.load, Streams(climb.seed)))
    assert sessions[-1].arrival_us <= climb.load.plan_us
    assert not climb.faults


def test_each_step_is_judged_by_its_own_rows():
    climb = climb_of(load_scenario("quickstart"))
    rows = []
    for entry in planned(climb.make_workload(), climb.load, Streams(climb.seed)):
        at = entry.arrival_us
        last_step = at >= climb.load.plan_us - STEP_S * 1e6
        sent = at + (150_000 if last_step else 500)
        rows.append(
            {
                "router": "dynamo-kv", "repeat": 0, "ingress": "i0", "request_id": f"q{entry.number}", "session": "s",
                "turn": 0, "phase": "steady", "status": "ok", "scheduled_us": at, "sent_us": sent,
                "first_token_us": sent + 100_000, "last_token_us": sent + 700_000, "end_us": sent + 700_000,
                "output_tokens": 26, "chunk_gaps_us": [24_000] * 25,
            }
        )  # fmt: skip
    found = diagnose(Arm(climb, climb.routers[0], 0), ArmRows(requests=rows, facts={}), None)
    assert [one.verdict for one in found.steps[:-1]] == ["ok"] * (len(found.steps) - 1)
    assert found.steps[-1].verdict == "invalid"
    assert "late" in " ".join(found.steps[-1].reasons)
    assert found.carried is found.steps[-2]
    for one in found.steps[2:-1]:
        assert one.streams == pytest.approx(one.requests_per_s * 0.7, rel=0.35)
        assert one.tokens_per_s == pytest.approx(one.requests_per_s * 26, rel=0.35)


def test_doctor_measures_real_processes_and_leaves_none(capsys):
    def ours():
        return {p.pid for p in psutil.Process().children(recursive=True)}

    before = ours()
    code = run_cli(["doctor", "quickstart", "--set", "fleet.replicas=2", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code in (0, 3)
    assert (code == 3) == (document["scenario"]["fits"] == "no")
    assert len(document["steps"]) >= 5
    assert {"tokens_per_s", "streams", "lag_ms_p99", "late_ms_p99", "verdict"} <= set(document["steps"][0])
    assert sum(one["tokens_per_s"] for one in document["steps"]) > 0
    assert ours() <= before


def test_doctor_does_not_measure_engines_that_run_elsewhere(capsys):
    assert run_cli(["doctor", "quickstart", "--set", 'fleet.urls=["http://127.0.0.1:1"]']) == 2
    assert "this machine" in capsys.readouterr().err
