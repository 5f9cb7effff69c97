"""`routebench calibrate`: a step-time preset from a user's own measurements, its residuals on the terminal.

The fit itself is `mock_engine.calibrate`; here are its options, its two tables and the file that it writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mock_engine.calibrate import Calibration, Residual
    from mock_engine.fit import Estimate

WORST_SHOWN = 12
POOR_MEAN_PCT, POOR_WORST_PCT = 20.0, 40.0
"""Beyond these a fit is called poor: of the presets that ship, which are fitted alike, most lie well below."""
FORMS = (
    "MEASUREMENTS.csv holds single steps or served points; its header says which. Lines that start with # and a column "
    "named note are skipped.",
    "Single steps, one a line, as a profiler shows them: step_ms; prefill_chunks, new_tokens, cached_tokens (chunks in "
    "the step, new tokens of each, tokens of each that were computed or cached before); decodes, context_tokens "
    "(sequences that decode one token, context length of each). Vary all of them: what nothing shows is refused.",
    "Served points, one a line, as a serving benchmark prints them: isl, osl, concurrency, ttft_ms, tpot_ms (means of "
    "a closed loop of so many clients; either time may be blank). Optional: requests (10 * concurrency), length_ratio "
    "(lengths are uniform from ratio * n to n), max_num_batched_tokens, max_num_seqs. Measure several lengths and "
    "concurrencies, below saturation.",
)

KV_PANEL = "KV memory"


def calibrate(
    measurements: Annotated[Path, typer.Argument(metavar="MEASUREMENTS.csv", help="Single steps or served points.")],
    out: Annotated[Path, typer.Option(help="The preset file to write; it must not exist yet.")],
    name: Annotated[str | None, typer.Option(help="Name of the preset.", show_default="that of the file")] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET",
            help="Stay near this preset's coefficients where the measurements say little, and take over its experts "
            "and KV memory.",
        ),
    ] = None,
    experts: Annotated[int | None, typer.Option(help="Experts of a mixture; with --top-k.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts that a token uses.")] = None,
    request_ms: Annotated[
        float | None,
        typer.Option(help="Time of a request outside the steps, if only steps were measured.", show_default="8"),
    ] = None,
    tp: Annotated[int | None, typer.Option("--tensor-parallel", help="GPUs of one replica.", show_default="1")] = None,
    kv_bytes: Annotated[
        int | None,
        typer.Option(help="KV bytes of a token: 2 * layers * kv_heads * head_dim * bytes.", rich_help_panel=KV_PANEL),
    ] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(help="KV blocks of 16 tokens, as the engine logs them.", rich_help_panel=KV_PANEL)
    ] = None,
    hbm_gib: Annotated[
        float | None,
        typer.Option(help="Instead of --kv-blocks: memory of one GPU; with --weights-gib.", rich_help_panel=KV_PANEL),
    ] = None,
    weights_gib: Annotated[
        float | None, typer.Option(help="Weights of the whole model.", rich_help_panel=KV_PANEL)
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads, if fewer than --tensor-parallel.", rich_help_panel=KV_PANEL)
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print every residual, not only the worst.")] = False,
) -> None:
    """Fit a step-time preset to your own measurements, print its residuals and write it as TOML."""
    from rich.console import Console

    from mock_engine import MockEngineError
    from mock_engine.calibrate import Target
    from mock_engine.calibrate import calibrate as fit

    if out.exists():
        raise UsageError(f"{out} exists already: name another file with --out, nothing was written")
    if out.suffix != ".toml":
        raise UsageError(f"--out {out}: a preset file ends in .toml, because that is how it is told from a name")
    if request_ms is not None and request_ms < 0:
        raise UsageError(f"--request-ms {request_ms:g} makes time run backwards: give 0 or more")
    if base is None and (kv_bytes is None or (kv_blocks is None and hbm_gib is None)):
        raise UsageError(
            "a preset needs the size of the KV memory: give --kv-bytes and --kv-blocks (or --hbm-gib and "
            "--weights-gib), or --base PRESET"
        )
    say, progress = Console(highlight=False), Console(stderr=True, highlight=False)
    fitting = progress.status("fitting ...")

    def tell(number: int, error: float) -> None:
        fitting.update(f"fitting: round {number}, rms error {error * 100:.1f} %")

    try:
        target = Target(
            name=name or out.stem,
            base=base,
            tensor_parallel=tp,
            kv_bytes_per_token=kv_bytes,
            kv_blocks=_blocks(kv_blocks, hbm_gib, weights_gib, kv_bytes, base, tp, kv_heads),
            experts=experts,
            top_k=top_k,
            request_fixed_us=None if request_ms is None else round(request_ms * 1000),
        )
        with fitting:
            done = fit(measurements, target, tell)
    except MockEngineError as error:
        raise UsageError(str(error)) from error
    _write(out, done, measurements, base)
    _print(say, done, show_all)
    for line in doubts(done, base):
        say.print(f"! {line}", style="yellow", markup=False)
    say.print(
        f"\nwrote {out}; use it with: routebench run SCENARIO --set engine.preset={out}, or "
        f"python -m mock_engine --mock-preset {out}",
        soft_wrap=True,
        markup=False,
    )


def add_calibrate(app: typer.Typer) -> None:
    app.command(help="\n\n".join([calibrate.__doc__ or "", *FORMS]))(calibrate)


def _blocks(
    given: int | None,
    hbm_gib: float | None,
    weights_gib: float | None,
    bytes_per_token: int | None,
    base: str | None,
    tensor_parallel: int | None,
    kv_heads: int | None,
) -> int | None:
    from mock_engine import load_preset
    from mock_engine.kv_memory import kv_blocks

    if hbm_gib is None and weights_gib is None:
        return given
    if given is not None or hbm_gib is None or weights_gib is None:
        raise UsageError("the KV blocks are either given with --kv-blocks, or follow from --hbm-gib and --weights-gib")
    known = None if base is None else load_preset(base)
    size = bytes_per_token or (known.kv_bytes_per_token if known else None)
    if size is None:
        raise UsageError("--hbm-gib needs the size of a token's KV: give --kv-bytes too")
    gpus = tensor_parallel or (known.tensor_parallel if known else 1)
    return kv_blocks(
        hbm_gib=hbm_gib, weights_gib=weights_gib, bytes_per_token=size, tensor_parallel=gpus, kv_heads=kv_heads
    )


def _write(out: Path, done: Calibration, measurements: Path, base: str | None) -> None:
    from mock_engine.presets import preset_toml

    text = (
        f"# Fitted by `routebench calibrate` to {len(done.residuals)} values of {done.kind} in {measurements.name}.\n"
        f"# {_summary(done.residuals)}\n"
        + "".join(f"# ! {line}\n" for line in doubts(done, base))
        + f"\n{preset_toml(done.preset)}"
    )
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error


def doubts(done: Calibration, base: str | None) -> list[str]:
    """Why the preset should not be relied on; none for a good fit."""
    means = {what: (sum(errors) / len(errors), max(errors)) for what, errors in _errors(done.residuals).items()}
    poor = [
        f"{what} is off by {mean:.0f} % on average and {worst:.0f} % at worst"
        for what, (mean, worst) in means.items()
        if mean > POOR_MEAN_PCT or worst > POOR_WORST_PCT
    ]
    lines = []
    if poor:
        lines.append(
            f"a poor fit: {', '.join(poor)}, where most presets stay below {POOR_MEAN_PCT:.0f} and "
            f"{POOR_WORST_PCT:.0f} %: look among the largest residuals for points beyond saturation or of another "
            "set-up, and drop those or measure again"
        )
    unsure = [
        name
        for name, estimate in done.estimates.items()
        if estimate.standard_error is not None and estimate.standard_error >= abs(estimate.value)
    ]
    if unsure:
        mend = "measure where they matter" + ("" if base else ", or give --base PRESET to stay near its values")
        lines.append(f"not known from these measurements (as uncertain as large): {', '.join(unsure)}; {mend}")
    return lines


def _errors(residuals: Sequence[Residual]) -> dict[str, list[float]]:
    """Absolute errors in percent of each kind of value."""
    found: dict[str, list[float]] = {}
    for residual in residuals:
        found.setdefault(residual.what, []).append(abs(residual.error_pct))
    return found


def _summary(residuals: Sequence[Residual]) -> str:
    """Mean and worst error of each kind of value."""
    return "; ".join(
        f"{what}: mean error {sum(errors) / len(errors):.1f} %, worst {max(errors):.1f} %"
        for what, errors in _errors(residuals).items()
    )


def _print(say: Console, done: Calibration, show_all: bool) -> None:
    worst = sorted(done.residuals, key=lambda residual: -abs(residual.error_pct))
    few = len(worst) <= WORST_SHOWN
    shown = list(done.residuals) if show_all or few else worst[:WORST_SHOWN]
    say.print(_coefficients(done.estimates, done.preset))
    title = "Residuals" if show_all or few else f"The {len(shown)} largest of {len(worst)} residuals (--all: every one)"
    say.print(_residuals(shown, title))
    say.print(_summary(done.residuals))


def _coefficients(estimates: Mapping[str, Estimate], preset: object) -> Table:
    from rich.table import Table

    table = Table(title="Coefficients", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("+-", justify="right")
    for name, estimate in estimates.items():
        error = "" if estimate.standard_error is None else f"{estimate.standard_error:.3g}"
        table.add_row(name, f"{getattr(preset, name):g}", error)
    return table


def _residuals(residuals: Sequence[Residual], title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for column in ("", "measured ms", "preset ms", "error %"):
        table.add_column(column, justify="right")
    for row in residuals:
        cells = (f"{row.measured_ms:.3f}", f"{row.model_ms:.3f}", f"{row.error_pct:+.1f}")
        table.add_row(row.where, row.what, *cells)
    return table
