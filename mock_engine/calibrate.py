"""A preset from a user's own measurements: a CSV of single steps, or of served points, becomes a `Preset`.

The header decides which of the two it is. Lines that start with # are skipped, and so is a column named `note`; any
other column that is not listed in `STEP_COLUMNS` or `SERVED_COLUMNS_ALLOWED` is an error. What is reported are the
residuals of the preset as it will be written, rounding included, not those of the solution before.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import msgspec

from mock_engine.config import EngineConfig
from mock_engine.cost_model import Batch, StepCost
from mock_engine.errors import ConfigError
from mock_engine.fit import (
    Estimate,
    Prior,
    ServedPoint,
    fit_served,
    fit_steps,
    serve_points,
    with_values,
)
from mock_engine.presets import BLOCK_TOKENS, Evidence, Preset, load_preset
from mock_engine.served import COLUMNS, REQUEST, SERVED_COLUMNS, ClosedLoop

STEP_COLUMNS = {
    "step_ms": "how long the step took (required)",
    "prefill_chunks": "prefill chunks in the step (default: 1 if new_tokens is given, else 0)",
    "new_tokens": "tokens of each chunk",
    "cached_tokens": "tokens of each chunk's request that were computed or cached before",
    "decodes": "sequences that decode one token",
    "context_tokens": "context length of each of them",
}
SERVED_COLUMNS_ALLOWED = {
    "isl": "prompt tokens (required)",
    "osl": "output tokens (required)",
    "concurrency": "clients that each send the next request when one ends (required)",
    "ttft_ms": "mean time to first token (may be blank)",
    "tpot_ms": "mean of (last - first) / (tokens - 1) (may be blank)",
    "requests": "requests of all clients (default: 10 * concurrency)",
    "length_ratio": "lengths are uniform in [ratio * n, n] (default: 5 % around isl, 10 % around osl)",
    "max_num_batched_tokens": "the engine's budget of a step (default: the engine's default)",
    "max_num_seqs": "the engine's limit of running requests (default: the engine's default)",
}
_REQUIRED_SERVED = ("isl", "osl", "concurrency")
NOTE = "note"
REQUESTS_PER_CLIENT = 10  # the public serving benchmarks send so many
INPUT_SPREAD, OUTPUT_SPREAD = 0.05, 0.10  # around lengths without a ratio, as timing tables without one are read
REQUEST_FIXED_US = 8_000  # of presets whose requests were not measured: what the operator fits of presets.toml carry
FIRST_SCHEDULE = "llama-3.1-8b-h100"  # where a fit of served points starts without a base; any preset serves


@dataclass(frozen=True, slots=True)
class Residual:
    """One measured value beside the preset's."""

    where: str  # the row in words
    what: str  # step, TTFT or TPOT
    measured_ms: float
    model_ms: float

    @property
    def error_pct(self) -> float:
        return (self.model_ms / self.measured_ms - 1) * 100


@dataclass(frozen=True, slots=True)
class Calibration:
    preset: Preset
    estimates: Mapping[str, Estimate]
    residuals: tuple[Residual, ...]
    kind: str  # steps or served points


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the measurements do not say. `base` names a preset whose coefficients are kept where they say little, and
    whose experts and KV size are taken over where none is given here."""

    name: str
    base: str | None = None
    tensor_parallel: int | None = None
    kv_bytes_per_token: int | None = None
    kv_blocks: int | None = None  # of 16 tokens
    experts: int | None = None
    top_k: int | None = None
    request_fixed_us: int | None = None  # only where requests are not measured


def calibrate(
    measurements: Path, target: Target, tell: Callable[[int, float], None] = lambda number, error: None
) -> Calibration:
    """Reads, fits and judges. `tell` hears of every round of a served fit: its number, the rms error before it."""
    rows = read_rows(measurements)
    base = None if target.base is None else load_preset(target.base)
    shape = _shape(target, base)
    if "step_ms" in rows[0].cells:
        return _from_steps(rows, target, base, shape)
    return _from_served(rows, base, shape, tell)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    source: str  # file and line
    cells: Mapping[str, str]  # blank ones left out but for the required

    def number(self, name: str, default: float | None = None, *, least: float = 0.0) -> float:
        text = self.cells.get(name, "").strip()
        if not text:
            if default is None:
                raise ConfigError(f"{self.source}: {name} is blank: give a number")
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{self.source}: {name}={text!r} is no number of at least {least:g}")
        return value

    def whole(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        value = self.number(name, default, least=least)
        if value != int(value):
            raise ConfigError(f"{self.source}: {name}={value} is no whole number")
        return int(value)

    def time_us(self, name: str) -> float | None:
        """Milliseconds in the file; None if blank."""
        if not self.cells.get(name, "").strip():
            return None
        value = self.number(name)
        if value <= 0:
            raise ConfigError(f"{self.source}: {name}={value:g} is no duration: leave it blank if it was not measured")
        return value * 1e3


def read_rows(path: Path) -> list[Row]:
    """The rows of one of the two forms, at least one."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if len(kept) < 2:
        raise ConfigError(f"{path} holds no measurement: give a line of column names and one line a measurement")
    header = [name.strip() for name in next(csv.reader([kept[0][1]]))]
    _check_header(path, header)
    rows = []
    for number, line in kept[1:]:
        values = next(csv.reader([line]))
        source = f"{path}:{number}"
        if len(values) != len(header):
            raise ConfigError(f"{source} has {len(values)} values for {len(header)} columns: give each column one")
        rows.append(Row(source, dict(zip(header, values, strict=True))))
    return rows


def _check_header(path: Path, header: Sequence[str]) -> None:
    forms: list[tuple[str, Mapping[str, str], tuple[str, ...]]] = [
        ("single steps", STEP_COLUMNS, ("step_ms",)),
        ("served points", SERVED_COLUMNS_ALLOWED, _REQUIRED_SERVED),
    ]
    form, allowed, required = forms[0] if "step_ms" in header else forms[1]
    missing = [name for name in required if name not in header]
    if missing:
        raise ConfigError(
            f"{path} has no column {missing[0]}: single steps need step_ms, served points need "
            f"{', '.join(_REQUIRED_SERVED)}; the columns there are {', '.join(header)}"
        )
    if form == "served points" and not {"ttft_ms", "tpot_ms"} & set(header):
        raise ConfigError(f"{path} measures nothing: give ttft_ms or tpot_ms or both")
    for name in header:
        if name not in allowed and name != NOTE:
            raise ConfigError(
                f"{path}: a file of {form} has no column {name!r}: choose of {', '.join(allowed)}, call it {NOTE}, or "
                "leave it out"
            )
    if len(set(header)) < len(header):
        raise ConfigError(f"{path} names a column twice: {', '.join(header)}")


# -- single steps ------------------------------------------------------------------------------------------------------


def _from_steps(rows: Sequence[Row], target: Target, base: Preset | None, shape: Preset) -> Calibration:
    batches = [_batch(row) for row in rows]
    measured = [row.time_us("step_ms") or math.nan for row in rows]
    for row, value in zip(rows, measured, strict=True):
        if math.isnan(value):
            raise ConfigError(f"{row.source}: step_ms is blank: give it or drop the row")
    prior = _prior(base, COLUMNS)
    estimates = fit_steps(batches, measured, experts=shape.experts, top_k=shape.top_k, prior=prior)
    request_us = target.request_fixed_us
    if request_us is None:
        request_us = REQUEST_FIXED_US if base is None else base.request_fixed_us
    cost = with_values(shape.cost, {**{name: e.value for name, e in estimates.items()}, REQUEST: request_us})
    modelled = [cost.step_ps(batch) / 1e6 for batch in batches]
    residuals = tuple(
        Residual(_step_in_words(row), "step", value / 1e3, model / 1e3)
        for row, value, model in zip(rows, measured, modelled, strict=True)
    )
    errors = sorted(abs(residual.error_pct) for residual in residuals)
    centre = mean(measured)
    total = sum((value - centre) ** 2 for value in measured)
    left = sum((value - model) ** 2 for value, model in zip(measured, modelled, strict=True))
    evidence = Evidence(
        kernel_fit_r2=round(1 - left / total, 4) if total else None,
        kernel_fit_median_pct=round(median(errors), 1),
        kernel_fit_p95_pct=round(errors[int(0.95 * (len(errors) - 1))], 1),
        kernel_fit_max_pct=round(errors[-1], 1),
    )
    return Calibration(_preset(shape, cost, evidence), estimates, residuals, "steps")


def _batch(row: Row) -> Batch:
    new = row.whole("new_tokens", 0)
    chunks = row.whole("prefill_chunks", 1 if new else 0)
    decodes = row.whole("decodes", 0)
    if bool(new) != bool(chunks):
        raise ConfigError(f"{row.source}: {chunks} prefill chunks of {new} new tokens are none: give both or neither")
    if not chunks and not decodes:
        raise ConfigError(f"{row.source} schedules nothing: give prefill chunks, decodes or both")
    cached = row.whole("cached_tokens", 0)
    context = row.whole("context_tokens", None if decodes else 0)
    return Batch.of([(new, cached)] * chunks, [context] * decodes)


def _step_in_words(row: Row) -> str:
    parts = []
    new = row.whole("new_tokens", 0)
    if new:
        cached = row.whole("cached_tokens", 0)
        parts.append(f"{row.whole('prefill_chunks', 1)} x {new} new" + (f" on {cached}" if cached else ""))
    if decodes := row.whole("decodes", 0):
        parts.append(f"{decodes} decodes at {row.whole('context_tokens', 0)}")
    return ", ".join(parts)


# -- served points -----------------------------------------------------------------------------------------------------


def _from_served(
    rows: Sequence[Row], base: Preset | None, shape: Preset, tell: Callable[[int, float], None]
) -> Calibration:
    points = [_point(row, shape.kv_blocks_16) for row in rows]
    start = shape.cost if base is not None else _first_cost(shape)
    estimates, cost = fit_served(points, start, prior=_prior(base, SERVED_COLUMNS), tell=tell)
    residuals = []
    for row, point, served in zip(rows, points, serve_points(points, cost), strict=True):
        load = f"isl {row.whole('isl')}, osl {row.whole('osl')}, concurrency {row.whole('concurrency')}"
        for what, value, model in (
            ("TTFT", point.ttft_us, served.ttft_us),
            ("TPOT", point.tpot_us, served.tpot_us),
        ):
            if value is not None and not math.isnan(model):
                residuals.append(Residual(load, what, value / 1e3, model / 1e3))
    errors = {
        what: [abs(residual.error_pct) for residual in residuals if residual.what == what] for what in ("TTFT", "TPOT")
    }
    evidence = Evidence(
        measured_rows=len(rows),
        ttft_mean_abs_pct=round(mean(errors["TTFT"]), 1) if errors["TTFT"] else None,
        ttft_worst_pct=round(max(errors["TTFT"]), 1) if errors["TTFT"] else None,
        tpot_mean_abs_pct=round(mean(errors["TPOT"]), 1) if errors["TPOT"] else None,
        tpot_worst_pct=round(max(errors["TPOT"]), 1) if errors["TPOT"] else None,
    )
    return Calibration(_preset(shape, cost, evidence), estimates, tuple(residuals), "served points")


def closed_loop(
    isl: int, osl: int, concurrency: int, length_ratio: float | None = None, requests: int | None = None
) -> ClosedLoop:
    """The load that a row of a serving table stands for: lengths uniform in [ratio * n, n], or spread a little around
    n where no ratio is known, and ten requests a client."""
    if length_ratio is None:
        inputs = round(isl * (1 - INPUT_SPREAD)), round(isl * (1 + INPUT_SPREAD))
        outputs = round(osl * (1 - OUTPUT_SPREAD)), round(osl * (1 + OUTPUT_SPREAD))
    else:
        inputs, outputs = (round(isl * length_ratio), isl), (round(osl * length_ratio), osl)
    return ClosedLoop(
        concurrency=concurrency,
        input_tokens=(max(1, inputs[0]), inputs[1]),
        output_tokens=(max(1, outputs[0]), outputs[1]),
        requests=requests or REQUESTS_PER_CLIENT * concurrency,
    )


def _point(row: Row, kv_blocks: int) -> ServedPoint:
    ratio = row.number("length_ratio", math.nan)
    if ratio > 1 or ratio == 0:
        raise ConfigError(f"{row.source}: length_ratio={ratio:g} is no share of a length: give more than 0, at most 1")
    concurrency = row.whole("concurrency", least=1)
    load = closed_loop(
        row.whole("isl", least=1),
        row.whole("osl", least=1),
        concurrency,
        None if math.isnan(ratio) else ratio,
        row.whole("requests", REQUESTS_PER_CLIENT * concurrency, least=1),
    )
    engine = EngineConfig()
    longest = load.input_tokens[1] + load.output_tokens[1]
    capacity = (kv_blocks - 1) * BLOCK_TOKENS
    if longest > capacity:
        raise ConfigError(
            f"{row.source}: a request of {longest} tokens never fits {kv_blocks} KV blocks of {BLOCK_TOKENS} tokens: "
            "correct the KV size or drop the row"
        )
    ttft_us, tpot_us = row.time_us("ttft_ms"), row.time_us("tpot_ms")
    if ttft_us is None and tpot_us is None:
        raise ConfigError(f"{row.source} measures nothing: give ttft_ms or tpot_ms or drop the row")
    if tpot_us is not None and load.output_tokens[1] < 2:
        raise ConfigError(f"{row.source}: one output token has no time per later token: leave tpot_ms blank")
    config = EngineConfig(
        num_gpu_blocks=kv_blocks,
        max_model_len=longest + 1,
        max_num_batched_tokens=row.whole("max_num_batched_tokens", engine.max_num_batched_tokens, least=1),
        max_num_seqs=row.whole("max_num_seqs", engine.max_num_seqs, least=1),
    )
    return ServedPoint(load=load, config=config, ttft_us=ttft_us, tpot_us=tpot_us)


# -- what the preset is otherwise --------------------------------------------------------------------------------------


def _prior(base: Preset | None, names: Sequence[str]) -> Prior:
    return {} if base is None else {name: getattr(base, name) for name in names}


def _first_cost(shape: Preset) -> StepCost:
    values = {name: getattr(load_preset(FIRST_SCHEDULE), name) for name in SERVED_COLUMNS}
    return with_values(shape.cost, values)


def _shape(target: Target, base: Preset | None) -> Preset:
    """A preset with everything but its coefficients: those of the base, or zeros."""
    given = {
        "tensor_parallel": target.tensor_parallel,
        "kv_bytes_per_token": target.kv_bytes_per_token,
        "kv_blocks_16": target.kv_blocks,
        "experts": target.experts,
        "top_k": target.top_k,
    }
    known = {name: value for name, value in given.items() if value is not None}
    if base is not None:
        values = {**msgspec.structs.asdict(base), **known}
    else:
        missing = [name for name in ("kv_bytes_per_token", "kv_blocks_16") if name not in known]
        if missing:
            raise ConfigError(
                f"the KV memory of preset {target.name!r} is not known ({', '.join(missing)}): give its size, or name "
                "a base preset"
            )
        values = {**dict.fromkeys(SERVED_COLUMNS, 0), **known}
    values.update(
        name=target.name, basis="user", form="moe-sum" if values.get("experts") else "max", evidence=Evidence()
    )
    return Preset(**values)


def _preset(shape: Preset, cost: StepCost, evidence: Evidence) -> Preset:
    values = {name: getattr(cost, name) for name in SERVED_COLUMNS}
    return msgspec.structs.replace(shape, **values, evidence=evidence)
