import io
from xml.etree import ElementTree as Xml

import pytest
from rich.console import Console

from reports import (
    default_rules,
    gate,
    gate_markdown,
    gate_table,
    junit,
    rules_of,
    rules_text,
    self_test,
    self_test_table,
)
from reports.tests.runs_by_hand import noisy_run, run_of
from reports.tests.test_gate import figures, sim


def printed(renderable, width=140):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


RESULTS = {
    "pass": gate(sim(), sim(), default_rules()),
    "regression": gate(run_of({"a": figures(hit_rate=0.1), "b": figures()}), sim(), default_rules()),
    "invalid": gate(sim(), sim(seed=1), default_rules()),
    "inconclusive": gate(noisy_run(1, repeats=1), noisy_run(2, repeats=1), default_rules()),
    "nothing": gate(sim(), sim(), rules_of({"rule": [{"scenario": "x", "exact": ["errors"]}]}, "f")),
    "lost": gate(run_of({"a": figures(ttft_ms=None)}), run_of({"a": figures()}), default_rules()),
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_table_fits_a_hundred_columns_and_starts_with_the_verdict(name):
    text = printed(gate_table(RESULTS[name]))
    assert text.splitlines()[0].startswith(f"gate {RESULTS[name].outcome.upper()}")
    assert max(map(len, text.splitlines())) <= 100
    assert max(map(len, printed(rules_text(RESULTS[name])).splitlines())) <= 100


def test_the_worst_line_comes_first():
    lines = printed(gate_table(RESULTS["regression"])).splitlines()
    assert lines[2].startswith("regression")


@pytest.mark.parametrize("name", RESULTS)
def test_the_xml_counts_what_it_holds(name):
    result = RESULTS[name]
    suites = Xml.fromstring(junit(result))
    suite = suites[0]
    cases = suite.findall("testcase")
    found = {tag: len(suite.findall(f"testcase/{tag}")) for tag in ("failure", "error", "skipped")}
    assert int(suite.get("tests")) == int(suites.get("tests")) == len(cases) > 0
    assert found == {
        "failure": int(suite.get("failures")),
        "error": int(suite.get("errors")),
        "skipped": int(suite.get("skipped")),
    }
    assert (found["failure"] > 0) == (result.outcome == "regression")
    assert (found["error"] > 0) == (result.outcome == "invalid")
    assert (found["skipped"] > 0) == (result.outcome == "inconclusive")
    facts = {each.get("name"): each.get("value") for each in suite.findall("properties/property")}
    assert facts["seed"] == "42"
    assert facts["commit"] == "abc"
    assert {case.get("classname") for case in cases} == {"quickstart"}


def test_a_failure_says_what_was_found_and_what_was_allowed():
    failure = Xml.fromstring(junit(RESULTS["regression"])).find(".//failure")
    assert "60.0 -> 10.0 %" in failure.get("message")
    assert "allowed -2.0 points" in failure.get("message")


def test_names_from_outside_are_text_in_every_form():
    evil = 'a"<b>|\x00&'
    run = run_of({evil: figures()}, scenario={"name": evil})
    result = gate(run, run, default_rules())
    assert Xml.fromstring(junit(result)) is not None
    assert "\\|" in gate_markdown(result)
    assert printed(gate_table(result))


def test_markdown_marks_what_is_wrong():
    text = gate_markdown(RESULTS["regression"])
    assert text.startswith("## Gate: regression")
    assert "| **regression** | a | `hit_rate:-2points` |" in text
    assert "**other-seed**" in gate_markdown(RESULTS["invalid"])


def test_the_self_test_shows_what_was_injected_and_missed():
    text = printed(self_test_table(self_test(sim(), default_rules())))
    assert "as expected" in text
    assert max(map(len, text.splitlines())) <= 100
    text = printed(self_test_table(self_test(noisy_run(5, repeats=2), default_rules())))
    assert "x nothing changed" in text


def test_a_policy_of_a_file_and_its_figure_stand_on_one_line():
    name = "my_router.py:MyPolicy"
    text = printed(
        gate_table(gate(run_of({name: figures(hit_rate=0.5)}), run_of({name: figures()}), default_rules())), 100
    )
    rows = [line for line in text.splitlines() if name in line and not line.startswith("- ")]
    assert rows == text.splitlines()[2 : 2 + len(rows)]
    assert len(rows) == len(RESULTS["pass"].lines) / 2


def test_a_rule_in_points_is_told_in_points():
    found = gate(run_of({"a": figures(hit_rate=0.638)}), run_of({"a": figures(hit_rate=0.792)}), default_rules())
    line = next(line for line in found.lines if line.address == "hit_rate")
    assert line.detail == "79.2 -> 63.8 % (-15.4 points), allowed -2.0 points"
