"""`routebench report RUN...`: renders a run again, joins several into one comparison, or exports for other tools."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from harness.errors import UsageError
from harness.run import prepare_folder
from reports import (
    EXPORTS,
    NOT_EXPORTED,
    ReportError,
    console,
    export_run,
    merge_runs,
    read_run,
    render_reports,
    terminal_table,
)


def report_command(runs: list[Path], *, out: Path | None, export: str | None, quiet: bool) -> int:
    """What `routebench report` does; returns its exit code."""
    try:
        if export:
            return _export(runs, export, out)
        if len(runs) == 1:
            if out is not None:
                raise UsageError("--out is for a comparison or an export: one run is rendered in its own folder")
            result = read_run(runs[0])
            render_reports(result)
        else:
            read = [read_run(run) for run in runs]
            result = merge_runs(read, prepare_folder(out, "comparison", datetime.now(UTC)))
    except ReportError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written ({error.strerror}); use a folder of yours") from error
    if not quiet:
        console().print(terminal_table(result))
    print(f"files: {result.folder}  (open {result.folder / 'report.html'})")
    return 0


def _export(runs: list[Path], name: str, out: Path | None) -> int:
    if name not in EXPORTS and name not in NOT_EXPORTED:
        from harness.errors import choose_from

        raise UsageError(f"no export format {name!r}: {choose_from(name, EXPORTS)}")
    for run in runs:
        target = out if out is not None and len(runs) == 1 else (out or run) / (run.name if out else "export")
        for path in export_run(read_run(run), name, target):
            print(f"wrote {path}")
    return 0
