"""One router's figures under aiperf's names: the profile as JSON and CSV, and a line of JSON for every request.

Percentiles are interpolated as aiperf's are. Its `inter_token_latency` is our token gap, a mean over an answer; its
`request_latency` our end to end. Where nobody told how many tokens a first chunk held, it is taken for one token.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.latency import PER_REQUEST
from reports.rows import Floats, Ints, Mask, Rows, arm_rows

if TYPE_CHECKING:
    from reports.run import RunResult

SCHEMA_VERSION = "1.4"
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_CSV = ("avg", "min", "max", "sum", *(f"p{percentile}" for percentile in PERCENTILES), "std")
_TITLES = {
    "time_to_first_token": "Time to First Token",
    "time_to_second_token": "Time to Second Token",
    "time_to_first_output_token": "Time to First Output Token",
    "inter_token_latency": "Inter Token Latency",
    "request_latency": "Request Latency",
    "output_token_throughput_per_user": "Output Token Throughput Per User",
    "output_sequence_length": "Output Sequence Length",
    "input_sequence_length": "Input Sequence Length",
    "inter_chunk_latency": "Inter Chunk Latency",
    "request_throughput": "Request Throughput",
    "output_token_throughput": "Output Token Throughput",
    "request_count": "Request Count",
    "error_request_count": "Error Request Count",
    "benchmark_duration": "Benchmark Duration",
    "overall_usage_prompt_cache_read_pct": "Overall Usage Prompt Cache Read",
}
_LATENCIES = {
    "time_to_first_token": "ttft_ms",
    "time_to_second_token": "ttst_ms",
    "time_to_first_output_token": "first_content_ms",
    "inter_token_latency": "token_gap_ms",
    "request_latency": "e2e_ms",
}


def aiperf_document(run: RunResult, router: str, repeat: int) -> dict[str, Any]:
    """profile_export_aiperf.json of one arm."""
    rows = arm_rows(run.requests, router, repeat)
    steady = rows.steady
    failed = steady.frame[~steady.ok]
    kinds = failed["error_class"].fillna(failed["status"]).value_counts()
    return {
        "schema_version": SCHEMA_VERSION,
        **dict(_profile(steady)),
        "input_config": {"scenario": run.scenario, "mode": run.mode, "seed": run.seed, "router": router},
        "error_summary": [{"error_details": {"type": str(kind)}, "count": int(count)} for kind, count in kinds.items()],
        "was_cancelled": run.status != "complete",
    }


def aiperf_csv(run: RunResult, router: str, repeat: int) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["Metric", *_CSV])
    for tag, figure in _profile(arm_rows(run.requests, router, repeat).steady):
        unit = figure["unit"]
        cells = ["" if figure.get(key) is None else f"{figure[key]:.6g}" for key in _CSV]
        writer.writerow([f"{_TITLES[tag]} ({unit})", *cells])
    return out.getvalue()


def aiperf_lines(run: RunResult, router: str, repeat: int) -> Iterator[str]:
    """profile_export.jsonl: one object a request, instants in nanoseconds since the arm's start."""
    rows = arm_rows(run.requests, router, repeat)
    values = {tag: _values(name, rows) for tag, name in _LATENCIES.items()}
    lengths = {f"{word}_sequence_length": rows.column(f"{column}_tokens") for word, column in _LENGTHS.items()}
    sent, end, due = (rows.column(name) for name in ("sent_us", "end_us", "scheduled_us"))
    turn = rows.column("turn")
    texts = [rows.frame[name].tolist() for name in ("request_id", "session", "phase", "status", "error_class", "error")]
    for place, (request, session, phase, status, kind, error) in enumerate(zip(*texts, strict=True)):
        metrics: dict[str, Any] = {
            tag: {"value": float(each[place]) / 1_000, "unit": "ms"}
            for tag, (each, known) in values.items()
            if known[place]
        }
        for tag, column in lengths.items():
            if column.known[place]:
                metrics[tag] = {"value": int(column.values[place]), "unit": "tokens"}
        document = {
            "metadata": {
                "x_request_id": request,
                "conversation_id": _text(session),
                "turn_index": int(turn.values[place]) if turn.known[place] else None,
                "credit_issued_ns": int(due.values[place]) * 1_000 if due.known[place] else None,
                "request_start_ns": int(sent.values[place]) * 1_000 if sent.known[place] else None,
                "request_end_ns": int(end.values[place]) * 1_000 if end.known[place] else None,
                "benchmark_phase": "profiling" if phase == "steady" else phase,
            },
            "metrics": metrics,
            "error": None if status == "ok" else {"type": _text(kind) or status, "message": _text(error) or status},
        }
        yield json.dumps(document, ensure_ascii=False, allow_nan=False)


_LENGTHS = {"input": "prompt", "output": "output"}


def _profile(steady: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    for tag, name in _LATENCIES.items():
        values, known = _values(name, steady)
        yield from _figure(tag, "ms", values[known] / 1_000)
    gap, known = _values(_LATENCIES["inter_token_latency"], steady)
    yield from _figure("output_token_throughput_per_user", "tokens/sec/user", 1e6 / gap[known & (gap > 0)])
    for word, column in _LENGTHS.items():
        found = steady.column(f"{column}_tokens")
        yield from _figure(f"{word}_sequence_length", "tokens", found.values[steady.ok & found.known])
    gaps = steady.gaps(steady.ok)
    if gaps is not None:
        yield from _figure("inter_chunk_latency", "ms", gaps.values / 1_000)
    seconds, successes = steady.window_us / 1e6, int(steady.ok.sum())
    output = steady.column("output_tokens").values[steady.ok].sum()
    if seconds:
        yield "request_throughput", {"unit": "requests/sec", "avg": successes / seconds}
        yield "output_token_throughput", {"unit": "tokens/sec", "avg": float(output) / seconds}
    yield "request_count", {"unit": "requests", "avg": float(successes)}
    yield "error_request_count", {"unit": "requests", "avg": float(len(steady) - successes)}
    yield "benchmark_duration", {"unit": "sec", "avg": seconds}
    prompt, cached = steady.column("prompt_tokens"), steady.column("cached_tokens")
    served: Mask = steady.ok & prompt.known & cached.known
    if prompt.values[served].sum():
        share = 100 * float(cached.values[served].sum()) / float(prompt.values[served].sum())
        yield "overall_usage_prompt_cache_read_pct", {"unit": "%", "avg": share}


def _values(name: str, rows: Rows) -> tuple[Ints | Floats, Mask]:
    values, known = PER_REQUEST[name](rows)
    if name != "token_gap_ms":
        return values, known
    tpot, usable = PER_REQUEST["tpot_ms"](rows)
    untold = usable & ~rows.column("first_chunk_tokens").known
    return np.where(untold, tpot, values), known | untold


def _figure(tag: str, unit: str, values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if not len(values):
        return
    each: Floats = np.asarray(values, dtype=np.float64)
    percentiles = dict(zip(PERCENTILES, np.percentile(each, PERCENTILES).tolist(), strict=True))
    yield (
        tag,
        {
            "unit": unit,
            "avg": float(each.mean()),
            **{f"p{percentile}": value for percentile, value in percentiles.items()},
            "min": float(each.min()),
            "max": float(each.max()),
            "std": float(each.std()),
            "count": len(each),
            "sum": float(each.sum()),
        },
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
