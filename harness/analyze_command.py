"""`routebench analyze` and `routebench convert`: what a workload or a trace holds, before anything is built or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from harness.analyze_page import analysis_page
from harness.errors import OutputError, UsageError
from harness.overrides import apply_override
from harness.scenario import DEFAULT_PRESET, builtin_names, load_scenario
from mock_engine import Batch, MockEngineError, Preset, load_preset
from reports import write_page
from workloads import (
    WORKLOADS,
    Analysis,
    Streams,
    Trace,
    TraceError,
    WorkloadsError,
    WorkloadTable,
    analyze,
    convert_workload,
    make_workload,
)

BAR = 40
"""Characters of a full bar."""
TRACE_SUFFIXES = (".jsonl", ".json", ".csv")
SLOTS = 16
"""Session slots of a workload that no scenario gives any."""


@dataclass(frozen=True)
class Source:
    """A workload and what its scenario, if it has one, says of the fleet."""

    workload: WorkloadTable
    seed: int = 42
    slots: int = SLOTS
    replicas: int = 8
    preset: str = DEFAULT_PRESET
    preset_said: bool = False
    """Whether a scenario names the preset and the fleet; otherwise they are assumptions."""
    replica_tokens: int | None = None
    """What one replica's cache holds, when a scenario says so."""


def find_workload(what: str, *, trace_format: str | None = None, overrides: Sequence[str] = ()) -> Source:
    """A trace file or a folder of them, a scenario, or a workload kind, with `key=value` for keys of its workload.

    Raises UsageError.
    """
    try:
        named = what in WORKLOADS or what in builtin_names()
        if (Path(what).is_file() and not what.endswith(".toml")) or (Path(what).is_dir() and not named):
            trace = {"kind": "trace", "path": what, "format": trace_format or "auto"}
            return Source(_workload_of(trace, overrides))
        if what == Trace.kind and not any(each.startswith("path=") for each in overrides):
            raise UsageError("a trace is named by its file, or the folder that holds its files: give that path instead")
        if what in WORKLOADS and what not in builtin_names():
            return Source(_workload_of({"kind": what}, overrides))
        if Path(what).suffix in TRACE_SUFFIXES:
            raise UsageError(
                f"{what}: no such file; give a trace file, a scenario or one of {', '.join(sorted(WORKLOADS))}"
            )
        scenario = load_scenario(what, overrides=[f"workload.{each}" for each in overrides])
        slots = scenario.load.concurrency or SLOTS
        workload = make_workload(scenario.workload)
    except WorkloadsError as error:
        raise UsageError(str(error)) from error
    engine = scenario.engine
    room = (engine.num_gpu_blocks - 1) * engine.block_size
    return Source(workload, scenario.seed, slots, len(scenario.fleet.names), scenario.preset_ref, True, room)


def _workload_of(table: dict[str, Any], overrides: Sequence[str]) -> WorkloadTable:
    for override in overrides:
        apply_override(table, override)
    return make_workload(table)


def analyze_command(
    what: str,
    *,
    trace_format: str | None,
    replicas: int | None,
    preset_name: str | None,
    prefill_fraction: float | None,
    blocks_per_replica: int | None,
    requests_max: int | None,
    as_json: bool,
    html: Path | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Prints the figures, the curve of hit rate against cache size, and a verdict in words; `html` gets all of it as a
    page with plots."""
    if html is not None and html.exists():
        raise UsageError(f"{html} exists already: name another file, nothing was written")
    source = find_workload(what, trace_format=trace_format, overrides=overrides)
    replicas = source.replicas if replicas is None else replicas
    try:
        preset = load_preset(preset_name or source.preset)
        found = analyze(
            source.workload,
            Streams(source.seed),
            replicas=(1, 2, 4, 8, 16, 32, replicas),
            concurrency=source.slots,
            requests_max=requests_max,
        )
        if not found.requests:
            raise UsageError(f"{what} holds no request: there is nothing to analyse")
        share = (
            prefill_fraction if prefill_fraction is not None else prefill_share(found, preset, source.slots / replicas)
        )
        verdict = found.verdict(replicas, share, blocks_per_replica)
    except (WorkloadsError, MockEngineError, ValueError) as error:
        raise UsageError(str(error)) from error
    assumed = "" if preset_name or source.preset_said else ", assumed: name yours with --preset"
    estimated = "given" if prefill_fraction is not None else f"estimated with {preset.name}{assumed}"
    rows = _figures(found, share, estimated, replicas)
    if html is not None:
        said = source.replica_tokens if not preset_name else None
        blocks = blocks_per_replica or (said // found.block_size if said else preset.blocks_of(found.block_size))
        try:
            write_page(analysis_page(what, found, verdict, rows, replicas=replicas, replica_blocks=blocks), html)
        except OSError as error:
            raise OutputError(f"{html} cannot be written: {error.strerror}") from error
    if as_json:
        document = {
            "analysis": msgspec.to_builtins(found),
            "prefill_fraction": share,
            "verdict": msgspec.to_builtins(verdict),
        }
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
        return 0
    say = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), title=what, title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    say.print(table)
    say.print(_curve(found))
    say.print(f"verdict: {verdict.text}")
    if html is not None:
        say.print(f"page: {html}")
    return 0


def prefill_share(found: Analysis, preset: Preset, batch: float) -> float:
    """Share of GPU time that goes to prompts when nothing is cached and `batch` answers are decoded together.

    A prompt costs its tokens and its attention; an output token its share of a decode step at the mean context.
    """
    prompt = found.prompt_tokens / found.requests
    context = round(prompt + found.output_tokens / found.requests / 2)
    together = max(1, round(batch))
    prefill = preset.cost.token_ps * prompt + preset.cost.prefill_attention_ps * prompt * prompt / 2
    step = preset.cost.step_ps(Batch.of(decode_contexts=[context] * together))
    decode = step / together * (found.output_tokens / found.requests)
    return prefill / (prefill + decode)


def _figures(found: Analysis, share: float, estimated: str, replicas: int) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{found.requests:,} in {found.sessions:,} sessions"),
        ("different prompts", f"{found.distinct_prompts:,}"),
        ("prompt tokens", f"{found.prompt_tokens:,}, median {found.prompt_tokens_median:,.0f} a request"),
        ("output tokens", f"{found.output_tokens:,}"),
        (f"share a prefix of {found.min_prefix_tokens} tokens or more", f"{found.sharing:.1%} of requests, "
         f"with one of the last {found.window_requests:,}"),
        ("mean shared length", "-" if found.shared_tokens_mean is None
         else f"{found.shared_tokens_mean:,.0f} tokens, {found.shared_fraction_mean:.1%} of the prompt"),
        ("hit rate of one endless cache", f"{found.hit_rate:.1%} of prompt tokens"),
        ("prefill share of GPU time", f"{share:.1%} ({estimated}, nothing cached)"),
    ]  # fmt: skip
    for dilution in found.dilution:
        mark = "  <- the fleet of the verdict (--replicas)" if dilution.replicas == replicas else ""
        rows.append((f"placed at random on {dilution.replicas}", f"{dilution.hit_rate:.1%}{mark}"))
    return rows


def _curve(found: Analysis) -> Table:
    """Hit rate against cache size: where more cache stops paying."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title="hit rate of one LRU cache by size",
                  title_justify="left")  # fmt: skip
    table.add_column("blocks", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("hit rate", justify="right")
    table.add_column("")
    for blocks, rate in zip(found.cache_blocks, found.cache_hit_rates, strict=True):
        table.add_row(f"{blocks:,}", f"{blocks * found.block_size:,}", f"{rate:.1%}", "█" * round(BAR * rate))
    return table


def convert_command(
    source: str, out: Path, *, trace_format: str | None, block_size: int | None, overrides: Sequence[str] = ()
) -> int:
    """Writes a workload or a foreign trace as a native trace with its sidecar."""
    if out.exists():
        raise UsageError(f"{out} exists already: name another file, nothing was written")
    found = find_workload(source, trace_format=trace_format, overrides=overrides)
    try:
        stated = convert_workload(found.workload, out, streams=Streams(found.seed), block_size=block_size)
    except TraceError as error:
        raise OutputError(str(error)) from error
    except WorkloadsError as error:
        raise UsageError(str(error)) from error
    print(
        f"wrote {out}: " + ", ".join(f"{key} {value}" for key, value in stated.items() if isinstance(value, int | str))
    )
    return 0
