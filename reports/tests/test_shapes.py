"""A run folder that was edited, cut or mixed up: one line that says what and the mend, never a crash, never silence."""

import json
import shutil
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reports import (
    EXPORTS,
    ReportError,
    export_run,
    finish_run,
    gate,
    merge_runs,
    read_figures,
    read_run,
    render_reports,
    rules_of,
    save_baseline,
    write_markdown,
)
from reports.tests.synthetic import ceilings, header, make_run

GONE = object()
STRANGE = (None, [], {}, "word", -1, 1e400, 1 << 53, True, [None], {"a": None}, GONE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rows, samples = make_run(["round-robin", "dynamo-kv"], sessions=6, turns=2)
    finish_run(folder, header(), rows, samples, ceilings=ceilings(rows), reports=False)
    return folder


def places(value, at=(), depth=4):
    yield at
    if depth and isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(min(2, len(value)))
        for key in keys:
            yield from places(value[key], (*at, key), depth - 1)


def changed(document, at, value):
    copy = json.loads(json.dumps(document))
    part = copy
    for key in at[:-1]:
        part = part[key]
    if value is GONE:
        del part[at[-1]]
    else:
        part[at[-1]] = value
    return copy


def test_whatever_one_key_holds_the_run_is_read_and_judged_or_refused_with_the_mend(whole, tmp_path):
    document = json.loads((whole / "run.json").read_text("utf-8"))
    good, rules = read_run(whole), rules_of({"relative": ["ttft_ms:p99:+5%"]}, "test")
    refused = []
    for at in list(places(document))[1:]:
        for value in STRANGE:
            (tmp_path / "run.json").write_text(json.dumps(changed(document, at, value)), "utf-8")
            try:
                run = read_run(tmp_path)
                gate(run, good, rules)
                gate(good, run, rules)
                save_baseline(run, "strange", tmp_path, replace=True, force=True)
                read_figures("strange", tmp_path)
            except ReportError as error:
                refused.append(str(error))
    assert len(refused) > 500
    assert not [text for text in refused if "\n" in text or not (str(tmp_path) in text or "router" in text)]


@pytest.mark.parametrize("file", ["requests.parquet", "fleet.parquet"])
@pytest.mark.parametrize("harm", ["missing", "cut", "noise", "swapped", "another run's"])
def test_rows_that_are_missing_cut_or_not_of_this_run_are_never_rendered(whole, tmp_path, file, harm):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = folder / file
    other = {"requests.parquet": "fleet.parquet", "fleet.parquet": "requests.parquet"}[file]
    if harm == "missing":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif harm == "noise":
        path.write_bytes(b"no parquet at all")
    elif harm == "swapped":
        shutil.copy(folder / other, path)
    else:
        rows, samples = make_run(["round-robin"], sessions=3, turns=2)
        finish_run(tmp_path / "other", header(), rows, samples, reports=False)
        shutil.copy(tmp_path / "other" / file, path)
        if file == "fleet.parquet":
            return  # samples have no count to hold them against
    with pytest.raises(ReportError, match=file):
        render_reports(read_run(folder))
    assert not (folder / "report.html").exists()


STRANGE_COLUMNS = (
    lambda old: None,
    lambda old: pa.nulls(len(old), old.type),
    lambda old: pa.array(old.to_pylist()[::-1], old.type),
    lambda old: pa.array([None, *old.to_pylist()[1:]], old.type),
    lambda old: pa.array(["word"] * len(old)),
    lambda old: pa.array([""] * len(old)),
    lambda old: pa.array([[5, None]] * len(old)),
    lambda old: pa.array([[-5]] * len(old)),
    *(
        lambda old, value=value: pa.array([value, *[0] * (len(old) - 1)])
        for value in (0, -1, -(1 << 53), (1 << 53) - 1, 1 << 62, 0.5, float("nan"), float("inf"))
    ),
)


@pytest.mark.parametrize("file", ["requests.parquet", "fleet.parquet"])
def test_whatever_one_column_holds_the_run_is_compared_and_exported_or_refused_with_the_mend(whole, tmp_path, file):
    table, chance = pq.read_table(whole / file), Random(7)
    folder, good = tmp_path / "run", read_run(whole)
    shutil.copytree(whole, folder)
    refused = []
    for place, name in enumerate(table.column_names):
        for change in chance.sample(STRANGE_COLUMNS, 2):
            new = change(table[name])
            changed_table = table.drop_columns([name]) if new is None else table.set_column(place, name, new)
            pq.write_table(changed_table.replace_schema_metadata(None), folder / file)
            try:
                run = read_run(folder)
                write_markdown(run, tmp_path / "report.md")
                export_run(run, chance.choice(list(EXPORTS)), tmp_path / "export")
                merge_runs([run, good], tmp_path / "merged", reports=False)
            except ReportError as error:
                refused.append(str(error))
    assert len(refused) > 10
    assert not [text for text in refused if "\n" in text or file not in text]


def test_a_path_and_what_was_found_are_named(whole, tmp_path):
    document = json.loads((whole / "run.json").read_text("utf-8"))
    document["routers"]["dynamo-kv"]["ttft_ms"]["p99"] = "fast"
    (tmp_path / "run.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(ReportError, match=r'routers\.dynamo-kv\.ttft_ms\.p99 is "fast" where a number must stand'):
        read_run(tmp_path)


def test_a_run_of_a_later_version_is_refused_with_its_number(whole, tmp_path):
    document = json.loads((whole / "run.json").read_text("utf-8")) | {"schema_version": 2}
    (tmp_path / "run.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(ReportError, match="schema_version 2 where 1 is read"):
        read_run(tmp_path)
