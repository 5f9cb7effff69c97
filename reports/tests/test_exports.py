"""Shapes of other tools as the conventions sheet gives them, and its test stream under each tool's rules."""

import csv
import json

import pytest

from reports import EXPORTS, ExportError, direction_of, export_run, finish_run, start_run
from reports.compare import HEADLINE_ADDRESSES, ROLLOUT_ADDRESSES
from reports.exports import benchmark_entries
from reports.tests.rows_by_hand import MS, request
from reports.tests.synthetic import ceilings, header, make_run

NAMES = ["round-robin", "dynamo-kv"]
VLLM = """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration
completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
total_token_throughput input_lens output_lens ttfts itls start_times generated_texts errors latencies queue_times
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rows, samples = make_run(NAMES, sessions=12, turns=3, repeats=3)
    folder = tmp_path_factory.mktemp("run")
    return finish_run(folder, header(), rows, samples, routers=NAMES, ceilings=ceilings(rows), reports=False)


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """The conventions' stub stream, once answered and once failed."""
    failed = {"status": "error", "error_class": "http_500", "error": "boom", "first_token_us": None}
    gone = {"last_token_us": None, "second_token_us": None, "output_tokens": None, "chunk_gaps_us": None}
    rows = [request(), request(1, sent_us=600 * MS, end_us=700 * MS, scheduled_us=590 * MS, **failed, **gone)]
    scenario = {"name": "stub", "load": {"driver": "sessions", "concurrency": 1, "model": "m"}}
    return finish_run(tmp_path_factory.mktemp("stub"), header(scenario=scenario), rows, [], reports=False)


def written(run, name, folder):
    return {path.relative_to(folder).as_posix(): path for path in export_run(run, name, folder)}


def test_vllm_has_every_key_of_the_sheet_and_its_own_figures(stream, tmp_path):
    (path,) = written(stream, "vllm", tmp_path).values()
    document = json.loads(path.read_text())
    assert set(VLLM.split()) <= set(document)
    for figure in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{word}_{figure}_ms" for word in ("mean", "median", "std", "p99")} <= set(document)
    assert (document["mean_ttft_ms"], document["mean_tpot_ms"], document["mean_e2el_ms"]) == (200, 50, 400)
    assert document["itls"] == [[0.05, 0.08, 0.07], []]
    assert document["ttfts"] == [0.2, 0]
    assert (document["completed"], document["failed"], document["num_prompts"]) == (1, 1, 2)
    assert document["errors"] == ["", "boom"]
    assert document["output_lens"] == [5, 0]
    assert document["request_rate"] == "inf"
    assert document["queue_times"] == [0, 0.01]
    assert document["date"] == "20260101-000000"
    assert document["total_token_throughput"] == pytest.approx(105 / 0.7)


def test_every_arm_has_a_vllm_file(run, tmp_path):
    files = written(run, "vllm", tmp_path)
    assert sorted(files) == sorted(f"vllm-{name}.{repeat}.json" for name in NAMES for repeat in range(3))
    one = json.loads(files["vllm-dynamo-kv.1.json"].read_text())
    metrics = next(each["metrics"] for each in run.repeats if (each["router"], each["repeat"]) == ("dynamo-kv", 1))
    assert one["label"] == "dynamo-kv"
    assert one["mean_ttft_ms"] == pytest.approx(metrics["ttft_ms"]["mean"], abs=1e-5)
    assert one["output_throughput"] == pytest.approx(metrics["output_tokens_per_s"])
    assert len(one["ttfts"]) == len(one["input_lens"]) == one["num_prompts"] == metrics["requests"]


def test_aiperf_has_the_shape_of_the_sheet(stream, tmp_path):
    files = written(stream, "aiperf", tmp_path)
    assert sorted(files) == ["a/profile_export.jsonl", "a/profile_export_aiperf.csv", "a/profile_export_aiperf.json"]
    document = json.loads(files["a/profile_export_aiperf.json"].read_text())
    assert document["schema_version"] == "1.4"
    assert {"input_config", "error_summary", "was_cancelled"} <= set(document)
    ttft = document["time_to_first_token"]
    assert {"unit", "avg", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "min", "max", "std"} <= set(
        ttft
    )
    assert (ttft["unit"], ttft["avg"], ttft["count"], ttft["sum"]) == ("ms", 200, 1, 200)
    assert document["time_to_second_token"]["avg"] == 50
    assert document["inter_token_latency"]["avg"] == 50
    assert document["request_latency"]["avg"] == 400
    assert document["error_summary"] == [{"error_details": {"type": "http_500"}, "count": 1}]

    rows = list(csv.reader(files["a/profile_export_aiperf.csv"].read_text().splitlines()))
    assert ",".join(rows[0]) == "Metric,avg,min,max,sum,p1,p5,p10,p25,p50,p75,p90,p95,p99,std"
    assert all(len(row) == len(rows[0]) for row in rows)
    assert rows[1][:2] == ["Time to First Token (ms)", "200"]

    lines = [json.loads(line) for line in files["a/profile_export.jsonl"].read_text().splitlines()]
    assert set(lines[0]) == {"metadata", "metrics", "error"}
    assert lines[0]["metadata"] == {
        "x_request_id": "q0",
        "conversation_id": "s0",
        "turn_index": 0,
        "credit_issued_ns": 0,
        "request_start_ns": 0,
        "request_end_ns": 500_000_000,
        "benchmark_phase": "profiling",
    }
    assert lines[0]["metrics"]["time_to_first_token"] == {"value": 200.0, "unit": "ms"}
    assert lines[0]["error"] is None
    assert lines[1]["error"] == {"type": "http_500", "message": "boom"}
    assert "time_to_first_token" not in lines[1]["metrics"]


def test_aiperf_counts_the_tokens_of_a_first_chunk_and_knows_when_the_answer_itself_began(tmp_path):
    """Two of five tokens in the first chunk: 200 ms over three, where TPOT has four."""
    rows = [request(first_chunk_tokens=2, first_content_us=330 * MS)]
    files = written(finish_run(tmp_path / "run", header(), rows, [], reports=False), "aiperf", tmp_path / "out")
    document = json.loads(files["a/profile_export_aiperf.json"].read_text())
    assert document["inter_token_latency"]["avg"] == pytest.approx(200 / 3)
    assert document["output_token_throughput_per_user"]["avg"] == pytest.approx(15)
    assert document["time_to_first_output_token"]["avg"] == 330
    line = json.loads(files["a/profile_export.jsonl"].read_text())
    assert line["metrics"]["inter_token_latency"] == {"value": pytest.approx(200 / 3), "unit": "ms"}


def test_units_are_aiperfs_own(stream, tmp_path):
    document = json.loads(written(stream, "aiperf", tmp_path)["a/profile_export_aiperf.json"].read_text())
    assert {tag: value["unit"] for tag, value in document.items() if isinstance(value, dict) and "unit" in value} == {
        "time_to_first_token": "ms",
        "time_to_second_token": "ms",
        "inter_token_latency": "ms",
        "request_latency": "ms",
        "inter_chunk_latency": "ms",
        "output_token_throughput_per_user": "tokens/sec/user",
        "input_sequence_length": "tokens",
        "output_sequence_length": "tokens",
        "request_throughput": "requests/sec",
        "output_token_throughput": "tokens/sec",
        "request_count": "requests",
        "error_request_count": "requests",
        "benchmark_duration": "sec",
    }


def test_the_rate_of_an_open_loop_is_that_of_requests_and_not_of_sessions(tmp_path):
    """Ten sessions of two turns in 0.9 s."""
    rows = [
        request(2 * n + turn, session=f"s{n}", turn=turn, scheduled_us=at, sent_us=at, end_us=at + 900 * MS)
        for n in range(10)
        for turn in (0, 1)
        for at in (n * 100 * MS,)
    ]
    for load in ({"rate_per_s": 10.0}, {"stages": [{"rate_per_s": 10.0, "duration_s": 2.0}]}):
        scenario = {"name": "open", "load": {"driver": "rate", **load}}
        run = finish_run(tmp_path / "run", header(scenario=scenario), rows, [], reports=False)
        (path,) = written(run, "vllm", tmp_path / "out").values()
        assert json.loads(path.read_text())["request_rate"] == pytest.approx(20 / 0.9)


def test_what_nobody_knows_is_null_and_not_zero(stream, tmp_path):
    (path,) = written(stream, "vllm", tmp_path).values()
    document = json.loads(path.read_text())
    assert document["request_goodput"] is None
    failed = finish_run(tmp_path / "run", header(), [request(status="error")], [], reports=False)
    (path,) = written(failed, "vllm", tmp_path / "out").values()
    assert {json.loads(path.read_text())[f"{word}_ttft_ms"] for word in ("mean", "median", "std", "p99")} == {None}


def test_the_benchmark_action_gets_a_file_for_each_direction(run, tmp_path):
    files = written(run, "github-action-benchmark", tmp_path)
    assert sorted(files) == ["benchmark-bigger-is-better.json", "benchmark-smaller-is-better.json"]
    for path in files.values():
        entries = json.loads(path.read_text())
        assert entries
        assert all(set(entry) <= {"name", "unit", "value", "range", "extra"} for entry in entries)
        assert all(entry["range"].startswith("± ") for entry in entries if "TTFT" in entry["name"])
        assert len({entry["name"] for entry in entries}) == len(entries)


def test_no_figure_is_in_the_file_of_the_wrong_direction(run):
    lower, higher = (len(benchmark_entries(run, way)) for way in ("lower", "higher"))
    known = [address for address in (*HEADLINE_ADDRESSES, *ROLLOUT_ADDRESSES) if direction_of(address) == "higher"]
    assert higher <= 2 * (len(known) + 1)
    assert lower > higher


@pytest.mark.parametrize("name", EXPORTS)
def test_the_same_run_exports_to_the_same_bytes_without_nan(run, tmp_path, name):
    one, two = written(run, name, tmp_path / "a"), written(run, name, tmp_path / "b")
    assert {key: path.read_bytes() for key, path in one.items()} == {
        key: path.read_bytes() for key, path in two.items()
    }
    assert not any("NaN" in path.read_text() or "Infinity" in path.read_text() for path in one.values())


def test_what_cannot_be_exported_says_why(run, tmp_path):
    with pytest.raises(ExportError, match="vllm, aiperf, github-action-benchmark"):
        export_run(run, "excel", tmp_path)
    start_run(tmp_path / "run", header())
    from reports import read_run

    with pytest.raises(ExportError, match="holds no figures"):
        export_run(read_run(tmp_path / "run"), "vllm", tmp_path)


def test_names_of_arms_become_file_names_that_do_not_clash(tmp_path):
    rows = [request(n, router=name) for n, name in enumerate(("my.py:A", "my.py/A"))]
    run = finish_run(tmp_path / "run", header(), rows, [], reports=False)
    files = written(run, "vllm", tmp_path / "out")
    assert len(files) == 2
    assert all("/" not in name and ":" not in name for name in files)


def test_a_format_that_cannot_be_checked_here_is_refused_with_the_way_round(run, tmp_path):
    with pytest.raises(ExportError, match="export vllm or aiperf"):
        export_run(run, "llm-d", tmp_path / "out")
