"""The measured serving points beside this folder, and what our engine makes of them in virtual time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from mock_engine import EngineConfig, load_preset
from mock_engine.calibrate import closed_loop
from mock_engine.served import serve_closed_loop

DATA = Path(__file__).parent / "data"
SEED = 1


@dataclass(frozen=True)
class Compared:
    """Milliseconds: measured, foretold by the other model, served by our engine."""

    preset: str
    isl: int
    osl: int
    concurrency: int
    ttft_ms: tuple[float, float, float]
    tpot_ms: tuple[float, float, float]


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a file in the data folder, comments left out."""
    with (DATA / name).open(encoding="utf-8") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def compare(wanted: Callable[[dict[str, str]], bool]) -> list[Compared]:
    """Serves the points that `wanted` accepts."""
    return [_serve(row) for row in rows("serving_closed.csv") if wanted(row)]


def _serve(row: dict[str, str]) -> Compared:
    isl, osl, concurrency = int(row["isl"]), int(row["osl"]), int(row["concurrency"])
    ratio = float(row["length_ratio"])
    load = closed_loop(isl, osl, concurrency, None if ratio == 1 else ratio)
    config = EngineConfig(
        num_gpu_blocks=int(row["kv_blocks_16"]),
        max_num_batched_tokens=int(row["max_num_batched_tokens"]),
        max_num_seqs=int(row["max_num_seqs"]),
    )
    served = serve_closed_loop(config, load_preset(row["preset"]).cost, load, Random(SEED))
    return Compared(
        row["preset"],
        isl,
        osl,
        concurrency,
        (float(row["ttft_ms_measured"]), float(row["ttft_ms_model"]), served.ttft_us / 1e3),
        (float(row["tpot_ms_measured"]), float(row["tpot_ms_model"]), served.tpot_us / 1e3),
    )


def error_pct(values: tuple[float, float, float], against: int) -> float:
    """Of ours: against 0, the measurement, or 1, the other model."""
    return abs(values[2] / values[against] - 1) * 100


def mean_pct(values: Iterable[tuple[float, float, float]], against: int) -> float:
    found = [error_pct(value, against) for value in values]
    return sum(found) / len(found)
