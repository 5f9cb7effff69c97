"""`routebench check` says what a run will be: every mode's cost or refusal, faults, tenants, setups of all routers."""

import pytest

from harness.cli import run_cli


def said(capsys, *words):
    assert run_cli(["check", "quickstart", *(part for word in words for part in ("--set", word))]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("faults.http_503=0.1", "--mode sim refuses it: faults.http_503 happens to processes"),
        ("routers=[{name='mine', command=['my-router', '{port}']}]", "--mode sim refuses it: router 'mine' is a"),
        ("routers=['clairvoyant']", "--mode live refuses it: policy 'clairvoyant' knows true lengths"),
    ],
)
def test_a_mode_that_would_refuse_is_not_estimated(capsys, override, why):
    told = said(capsys, override)
    assert why in told
    mode = why.split()[1]
    assert f"--mode {mode}: about" not in told


def test_what_no_mode_can_run_is_refused(capsys):
    words = ["--router", "clairvoyant", "--set", "faults.http_503=0.1"]
    assert run_cli(["check", "quickstart", *words]) == 2
    shown = capsys.readouterr()
    assert "no mode can run it: sim: faults.http_503" in shown.err
    assert shown.out == ""


def test_faults_and_tenants_are_shown(capsys):
    faults = "faults={event_drop=0.3, router_body_truncate_bytes=400, replicas=['r1']}"
    told = said(capsys, faults, "workload.tenants=3")
    assert "faults of r1: event_drop = 0.3" in told
    assert "faults of round-robin, session-ring, dynamo-kv: body-truncate-bytes=400" in told
    assert "3 tenants, none of which shares a block" in told


def test_a_router_that_is_not_ours_has_ingresses_and_no_ramp(capsys):
    routers = "routers=['round-robin', {name='mine', command=['my-router', '{port}', '{worker_urls}']}]"
    told = said(capsys, routers, "router.ramp_s=5", "router.ingresses=2")
    assert "round-robin: 2 ingresses (by turn) that share nothing, a ramp of 5 s" in told
    assert "mine: 2 ingresses (by turn) that share nothing load" in told


def test_a_word_in_braces_that_stands_for_nothing_is_refused(capsys):
    assert run_cli(["check", "quickstart", "--set", "routers=[{name='mine', command=['{wrker_urls}']}]"]) == 2
    assert "router 'mine': {wrker_urls} in a router's command stands for nothing: did you mean 'worker_urls'?" in (
        capsys.readouterr().err
    )


def test_an_entry_of_a_list_is_overridden_by_its_number(capsys):
    assert "20 s crash r2" in said(capsys, "churn=[{do='crash', at_s=20, replica='r1'}]", "churn.0.replica=r2")


@pytest.mark.parametrize("key", ["routers.7", "routers.x", "routers.0.name.y"])
def test_an_entry_that_is_not_there_is_refused(capsys, key):
    assert run_cli(["check", "quickstart", "--set", f"{key}=random"]) == 2
    error = capsys.readouterr().err
    assert "give the number of one (0 to 2)" in error or "is a value, not a table" in error
