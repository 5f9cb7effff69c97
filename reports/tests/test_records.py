import json

import pandas as pd
import pyarrow.parquet as pq
import pytest

from reports import (
    FLEET_COLUMNS,
    REQUEST_COLUMNS,
    ROUTER_COLUMNS,
    RecordError,
    fleet_frame,
    read_json_lines,
    read_parquet,
    requests_frame,
    write_parquet,
)
from reports.tests.rows_by_hand import request, sample


def test_the_columns_are_those_of_the_contract_in_its_order():
    assert ", ".join(REQUEST_COLUMNS) == (
        "router, repeat, ingress, request_id, session, turn, group, rollout_step, replica, reason, ready_us, "
        "scheduled_us, sent_us, routed_us, admitted_us, first_token_us, second_token_us, first_content_us, "
        "last_token_us, end_us, phase, prompt_tokens, output_tokens, first_chunk_tokens, cached_tokens, token_source, "
        "believed_hit_tokens, chunk_gaps_us, status, error_class, error"
    )
    assert ", ".join(FLEET_COLUMNS) == (
        "router, repeat, t_us, replica, running, waiting, used_blocks, active_decode_blocks, hit_tokens, query_tokens, "
        "evicted_blocks, preemptions, step_us_mean, late_us_p99"
    )
    assert ", ".join(ROUTER_COLUMNS) == "router, repeat, ingress, t_us, index_size, in_flight"


def test_what_a_row_leaves_out_is_null_not_zero():
    frame = requests_frame([request(cached_tokens=0), request(1)])
    assert frame["cached_tokens"].isna().tolist() == [False, True]
    assert frame["routed_us"].isna().all()


def test_rows_and_columns_give_the_same_frame():
    rows = [request(number, turn=number) for number in range(3)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pd.testing.assert_frame_equal(requests_frame(rows), requests_frame(columns))
    pd.testing.assert_frame_equal(requests_frame(rows), requests_frame(pd.DataFrame(columns)))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (request(latency=3), "unknown key 'latency'"),
        (request(status="fine"), "status 'fine' is not known: use one of ok, error, incomplete, cancelled"),
        (request(phase="hot"), "phase 'hot'"),
        (request(sent_us="soon"), "'sent_us' must hold Int64"),
        (request(sent_us=1.5), "'sent_us' must hold Int64"),
        (request(router=None), "without 'router'"),
    ],
)
def test_a_row_against_the_contract_is_an_error_that_names_the_key(row, told):
    with pytest.raises(RecordError, match=told.replace("(", r"\(")):
        requests_frame([row])


def test_columns_of_different_length_are_refused():
    with pytest.raises(RecordError, match="same length"):
        fleet_frame({"router": ["a", "a"], "repeat": [0, 0], "t_us": [0, 1], "replica": ["r0"]})


def test_parquet_gives_back_the_frame_with_lists_and_nulls(tmp_path):
    frame = requests_frame([request(), request(1, chunk_gaps_us=None), request(2, chunk_gaps_us=[])])
    write_parquet(frame, tmp_path / "requests.parquet")
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "requests.parquet"), frame)
    fleet = fleet_frame([sample(step_us_mean=12.5), sample("r1")])
    write_parquet(fleet, tmp_path / "fleet.parquet")
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "fleet.parquet"), fleet)


def test_an_empty_frame_survives_parquet(tmp_path):
    write_parquet(requests_frame([]), tmp_path / "requests.parquet")
    assert list(read_parquet(tmp_path / "requests.parquet").columns) == list(REQUEST_COLUMNS)


def test_parquet_metadata_names_no_time_and_no_library_version(tmp_path):
    write_parquet(requests_frame([request()]), tmp_path / "requests.parquet")
    metadata = json.loads(pq.read_schema(tmp_path / "requests.parquet").metadata[b"pandas"])
    assert metadata["pandas_version"] == "2.2.0"
    assert metadata["creator"]["version"] == "0"


def test_plain_pandas_reads_whole_numbers_as_nullable(tmp_path):
    write_parquet(requests_frame([request(), request(1, sent_us=None)]), tmp_path / "requests.parquet")
    plain = pd.read_parquet(tmp_path / "requests.parquet")
    assert plain["sent_us"].dtype == "Int64"
    assert list(plain["chunk_gaps_us"][0]) == [50_000, 80_000, 70_000]


@pytest.mark.parametrize("value", [-1, 1 << 20, (1 << 53) - 1])
def test_a_repeat_that_no_run_has_is_refused(value):
    with pytest.raises(RecordError, match=r"column 'repeat' has .* counts from 0 and stays below 1,048,576"):
        requests_frame([request(repeat=value)])
    with pytest.raises(RecordError, match="'repeat'"):
        fleet_frame([sample(repeat=value)])
    with pytest.raises(RecordError, match="'rollout_step'"):
        requests_frame([request(rollout_step=1 << 40)])


def test_a_gap_that_is_null_is_refused():
    with pytest.raises(RecordError, match=r"'chunk_gaps_us' must hold .*null"):
        requests_frame([request(chunk_gaps_us=[5, None])])


def test_a_cut_parquet_file_is_an_error_that_says_so(tmp_path):
    (tmp_path / "requests.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RecordError, match="was killed while writing"):
        read_parquet(tmp_path / "requests.parquet")


def test_a_cut_last_line_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3, "b": "cu')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n\n{"a": 2}')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a": 2}\n4')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(RecordError, match=r"rows\.jsonl:2"):
        read_json_lines(path)
