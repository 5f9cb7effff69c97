"""The reference of keys says what the structs say: every key, its kind, its default, its choices."""

import msgspec
import pytest

from harness.cli import run_cli
from harness.keys import TABLES, distributions, keys_text
from workloads import WORKLOADS


@pytest.mark.parametrize("name", TABLES)
def test_every_key_of_every_table_is_listed_in_lines_that_fit(name):
    text = keys_text(name, 80)
    keys = {line.split(" ")[0].removeprefix("router_") for line in text.splitlines()[1:] if not line.startswith(" ")}
    assert {field.encode_name for field in msgspec.structs.fields(TABLES[name][1])} <= keys
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith("    ") and "{" not in line)


def test_what_a_key_may_be_is_said_with_its_default(capsys):
    assert run_cli(["scenarios", "--keys", "load"]) == 0
    assert 'driver = "sessions"  (one of sessions, requests, rate)' in capsys.readouterr().out
    assert "do  (one of add, drain, remove, crash, restart)" in keys_text("churn")
    assert "turns = 6  (a whole number or a distribution)\n    Requests of a conversation." in keys_text("multi-turn")
    assert "{worker_urls}: URLs of all replicas" in keys_text("routers")


def test_every_workload_kind_is_a_table_and_every_distribution_is_told():
    assert set(WORKLOADS) <= set(TABLES)
    assert len(distributions()) == 6
    assert '{ dist = "lognormal", mean, sigma, min (optional), max (optional) }' in keys_text("dist")


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--keys", "laod"], "did you mean 'load'?"), (["--keys", "load", "--copy", "herding"], "one of")],
)
def test_a_table_that_there_is_not_is_refused(capsys, words, says):
    assert run_cli(["scenarios", *words]) == 2
    assert says in capsys.readouterr().err
