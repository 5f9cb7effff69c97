"""What a table holds has one short text, whatever file or library it came through."""

import json
import random
import shutil

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reports import RecordError, ReportError, finish_run, read_figures, read_parquet, read_run, write_parquet
from reports.digests import digest
from reports.tests.rows_by_hand import frames, request, sample
from reports.tests.synthetic import header

ROWS = [request(n, reason="é" * (n % 3) or None, sent_us=n, chunk_gaps_us=[n] * n) for n in range(40)]
SAMPLES = [sample("r0", n, step_us_mean=n / 3 if n % 2 else None) for n in range(40)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return finish_run(folder, header(), ROWS, SAMPLES, routers=["a"], reports=False).folder


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def test_rows_that_went_through_a_file_have_the_digest_of_those_that_did_not(tmp_path):
    for place, frame in enumerate(frames(ROWS, SAMPLES)):
        write_parquet(frame, tmp_path / f"{place}.parquet")
        assert digest(read_parquet(tmp_path / f"{place}.parquet")) == digest(frame)


def test_a_digest_is_the_same_everywhere():
    """A golden: as digests stand in run.json, which is the same for all versions of Python and of libraries."""
    requests, fleet = frames(ROWS, SAMPLES)
    assert digest(requests) == "blake2b:b79c34f20f84e1e4c954fb51135ba729"
    assert digest(fleet) == "blake2b:0c256ebbd6e5cb5d45abc751833d3014"


def test_every_value_and_the_order_of_rows_counts():
    whole, _ = frames(ROWS)
    changed = [
        frames([*ROWS[:-1], ROWS[-1] | change])[0]
        for change in ({"end_us": 7}, {"reason": ""}, {"chunk_gaps_us": [39] * 38}, {"error": "x"})
    ]
    found = [digest(each) for each in (whole, *changed, frames(ROWS[:-1])[0], frames(ROWS[::-1])[0])]
    assert len(set(found)) == len(found)


def test_where_a_text_ends_counts():
    one, two = (frames([request(0, reason=a), request(1, reason=b)])[0] for a, b in (("ab", "c"), ("a", "bc")))
    assert digest(one) != digest(two)


def test_a_part_of_a_table_has_the_digest_of_a_table_of_its_own():
    whole, _ = frames(ROWS)
    assert digest(whole[10:20].reset_index(drop=True)) == digest(frames(ROWS[10:20])[0])
    assert digest(pd.concat([whole[:15], whole[15:]])) == digest(whole)


def test_a_column_that_an_earlier_version_did_not_have_changes_nothing(copy):
    table = pq.read_table(copy / "requests.parquet")
    pq.write_table(table.drop_columns(["error", "group"]), copy / "requests.parquet")
    read_figures(copy)


def test_a_run_of_an_earlier_version_has_no_digests_and_is_read(copy):
    document = json.loads((copy / "run.json").read_text())
    assert list(document.pop("digests")) == ["requests.parquet", "fleet.parquet"]
    (copy / "run.json").write_text(json.dumps(document))
    assert len(read_figures(copy).requests) == len(ROWS)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("end_us", -5, "before last_token_us"),
        ("end_us", 1 << 62, "beyond"),
        ("sent_us", 1 << 50, "first_token_us"),
        ("status", "zz", "status 'zz'"),
    ],
)
@pytest.mark.parametrize("digests", [True, False])
def test_impossible_rows_are_refused_by_whoever_reads_figures(copy, column, value, words, digests):
    table = pq.read_table(copy / "requests.parquet")
    kind = pa.string() if column == "status" else pa.int64()
    spoilt = table.set_column(table.schema.get_field_index(column), column, pa.array([value] * len(table), kind))
    pq.write_table(spoilt, copy / "requests.parquet")
    if not digests:
        document = json.loads((copy / "run.json").read_text())
        (copy / "run.json").write_text(json.dumps(document | {"digests": {}}))
    with pytest.raises(RecordError) as told:
        read_figures(copy)
    assert words in str(told.value) or digests
    assert "requests.parquet" in str(told.value)


@pytest.mark.parametrize("file", ["requests.parquet", "fleet.parquet"])
def test_no_flipped_bit_changes_a_value_unseen(finished, copy, file):
    """Flips of what no value depends on, such as statistics, may pass."""
    whole = (finished / file).read_bytes()
    before = read_run(finished)
    chance = random.Random(1)
    refused = 0
    for _ in range(60):
        bits = bytearray(whole)
        bits[chance.randrange(len(bits))] ^= 1 << chance.randrange(8)
        (copy / file).write_bytes(bits)
        try:
            run = read_figures(copy)
        except ReportError:
            refused += 1
        else:
            assert run.requests.equals(before.requests)
            assert run.fleet.equals(before.fleet)
    assert refused


def test_a_table_that_is_gone_is_missed(copy):
    (copy / "fleet.parquet").unlink()
    with pytest.raises(RecordError, match=r"fleet\.parquet: is not there"):
        read_figures(copy)
