"""`routebench gate`: judges a run against a baseline and turns the verdict into an exit code for CI.

0 pass, 1 regression, 2 usage or unreadable file, 3 invalid or incomparable run, 4 nothing worse but something
inconclusive. The reason stands on stderr in one line; the run folder gets the same verdict as gate.json and junit.xml.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from harness.errors import UsageError
from reports import (
    BASELINE_FOLDER,
    GateResult,
    ReportError,
    Rules,
    RunResult,
    console,
    default_rules,
    gate,
    gate_markdown,
    gate_table,
    junit,
    read_figures,
    read_rules,
    rules_text,
    self_test,
    self_test_table,
)

SELF_TEST_SCENARIO = "quickstart"
EXIT_MISSED = 1
"""Exit code of a self-test that did not catch its fault."""


def gate_command(
    current: Path | None,
    baseline: str | None,
    rules_file: Path | None,
    *,
    junit_file: Path | None = None,
    summary: Path | None = None,
    folder: Path = Path(BASELINE_FOLDER),
    force: bool = False,
    as_json: bool = False,
    self_test_only: bool = False,
) -> int:
    """What `routebench gate` does; returns its exit code. Raises UsageError for what cannot be read or understood."""
    try:
        rules = read_rules(rules_file) if rules_file else default_rules()
        if self_test_only:
            return _self_test(str(current) if current else baseline, rules, folder)
        if current is None:
            raise UsageError("no run to judge: give --current RUN, the folder that `routebench run --out` wrote")
        run = read_figures(current, folder)
        result = gate(run, read_figures(baseline, folder) if baseline else None, rules, force=force)
    except ReportError as error:
        raise UsageError(str(error)) from error
    _write(result, run, junit_file, summary)
    if as_json:
        print(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        say = console()
        if rules_file is None:
            say.print(rules_text(result))
        say.print(gate_table(result))
    if result.exit_code:
        print(f"gate: {result.reason}", file=sys.stderr)
    return result.exit_code


def _write(result: GateResult, run: RunResult, junit_file: Path | None, summary: Path | None) -> None:
    document = json.dumps(result.to_json(), indent=2, ensure_ascii=False) + "\n"
    try:
        if run.folder.is_dir():
            (run.folder / "gate.json").write_text(document, "utf-8")
            (run.folder / "junit.xml").write_text(junit(result), "utf-8")
        if junit_file:
            junit_file.write_text(junit(result), "utf-8")
        if summary:
            with summary.open("a", encoding="utf-8") as file:
                file.write(gate_markdown(result))
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written ({error.strerror}); name another place") from error


def _self_test(place: str | None, rules: Rules, folder: Path) -> int:
    """On the run or baseline given, else on a small simulation of its own."""
    if place:
        found = self_test(read_figures(place, folder), rules)
    else:
        from harness.run import run_mode
        from harness.scenario import load_scenario

        with tempfile.TemporaryDirectory() as made:
            run = run_mode(load_scenario(SELF_TEST_SCENARIO), "sim", Path(made)).result
            found = self_test(run, rules)
    console().print(self_test_table(found))
    missed = [one for one in found if not one.caught]
    if missed:
        print(f"gate: self-test missed {len(missed)} of {len(found)}: {missed[0].fault}", file=sys.stderr)
    return EXIT_MISSED if missed else 0
