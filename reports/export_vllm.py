"""One router's figures as `vllm bench serve --save-result --save-detailed` writes them, for scripts that read these.

The rules are vLLM's, not ours: percentiles are interpolated, `itl` is the raw gap between chunks, lists are in seconds
and hold every request in the order of sending, with 0 where one failed. Answers have no text here, since none was kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.latency import PER_REQUEST
from reports.loops import loop_of
from reports.rows import Floats, Rows, arm_rows

if TYPE_CHECKING:
    from reports.run import RunResult

_STATISTICS: dict[str, Callable[[Floats], Any]] = {
    "mean": np.mean,
    "median": np.median,
    "std": np.std,
    "p99": lambda values: np.percentile(values, 99),
}


def vllm_document(run: RunResult, router: str, repeat: int) -> dict[str, Any]:
    """The document of one arm. Unknown figures are null, as in everything we write."""
    steady = arm_rows(run.requests, router, repeat).steady
    ok = steady.ok
    prompt, output = steady.column("prompt_tokens"), steady.column("output_tokens")
    seconds = steady.window_us / 1e6
    load = run.scenario.get("load", {})
    inputs, outputs = int(prompt.values[ok].sum()), int(output.values[ok].sum())
    gaps = _gaps(steady)
    metrics = next(each["metrics"] for each in run.repeats if (each["router"], each["repeat"]) == (router, repeat))
    return {
        "date": _date(run.started_at),
        "endpoint_type": "openai-chat" if load.get("api") == "chat" else "openai",
        "backend": "openai-chat" if load.get("api") == "chat" else "openai",
        "label": router,
        "model_id": load.get("model"),
        "tokenizer_id": load.get("model"),
        "num_prompts": len(steady),
        "scenario": run.name,
        "mode": run.mode,
        "seed": run.seed,
        "repeat": repeat,
        "request_rate": _request_rate(run, router, repeat),
        "burstiness": load.get("burstiness", 1.0),
        "max_concurrency": load.get("concurrency"),
        "duration": seconds,
        "completed": int(ok.sum()),
        "failed": len(steady) - int(ok.sum()),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": int(ok.sum()) / seconds if seconds else None,
        "request_goodput": metrics.get("request_goodput"),
        "output_throughput": outputs / seconds if seconds else None,
        "total_token_throughput": (inputs + outputs) / seconds if seconds else None,
        **_statistics("ttft", _sample(steady, "ttft_ms")),
        **_statistics("tpot", _sample(steady, "tpot_ms")),
        **_statistics("itl", np.array([gap for each in gaps for gap in each], dtype=np.float64) * 1_000),
        **_statistics("e2el", _sample(steady, "e2e_ms")),
        "input_lens": prompt.values.tolist(),
        "output_lens": np.where(ok, output.values, 0).tolist(),
        "ttfts": _per_request(steady, "ttft_ms"),
        "itls": gaps,
        "start_times": [round(value / 1e6, 6) for value in steady.column("sent_us").values.tolist()],
        "generated_texts": [""] * len(steady),
        "errors": ["" if text is None else text for text in _texts(steady)],
        "latencies": _per_request(steady, "e2e_ms"),
        "queue_times": _per_request(steady, "sched_lag_ms"),
    }


def _request_rate(run: RunResult, router: str, repeat: int) -> float | str | None:
    """Requests a second as they fell due, also where a scenario counts sessions; "inf" of a closed loop, as vLLM's."""
    if loop_of(run.scenario) == "closed":
        return "inf"
    own = [each for each in run.stages if (each["router"], each["repeat"]) == (router, repeat) and each["asked_per_s"]]
    seconds = sum(each["requests"] / each["asked_per_s"] for each in own)
    return round(sum(each["requests"] for each in own) / seconds, 6) if seconds else None


def _sample(rows: Rows, name: str) -> Floats:
    values, mask = PER_REQUEST[name](rows)
    return np.asarray(values[mask] / 1_000, dtype=np.float64)


def _per_request(rows: Rows, name: str) -> list[float]:
    values, mask = PER_REQUEST[name](rows)
    return [round(value / 1e6, 6) for value in np.where(mask, values, 0).tolist()]


def _statistics(name: str, values: Floats) -> dict[str, float | None]:
    return {
        f"{word}_{name}_ms": round(float(function(values)), 6) if len(values) else None
        for word, function in _STATISTICS.items()
    }


def _gaps(rows: Rows) -> list[list[float]]:
    return [
        [round(gap / 1e6, 6) for gap in gaps] if isinstance(gaps, list | np.ndarray) else []
        for gaps in rows.frame["chunk_gaps_us"].tolist()
    ]


def _texts(rows: Rows) -> list[str | None]:
    kept = zip(rows.ok.tolist(), rows.frame["error"].tolist(), rows.frame["status"].tolist(), strict=True)
    return [None if ok else error if isinstance(error, str) else status for ok, error, status in kept]


def _date(started_at: str | None) -> str | None:
    """`20260131-235959`, in the zone in which the run says it started."""
    if not started_at:
        return None
    digits = "".join(character for character in started_at[:19] if character.isdigit())
    return f"{digits[:8]}-{digits[8:14]}" if len(digits) == 14 else None
