"""Sub-commands that judge and render what runs left behind: `gate`, `baseline`, `report`.

Only the options stand here; what a command does is imported when it is called, so that `--help` stays quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DIRECTORY = Path("baselines")  # as `reports.baseline.FOLDER`; a test holds them together

DirOpt = Annotated[Path, typer.Option("--dir", help="Folder of baselines; a bare name is looked up there.")]

baselines = typer.Typer(
    no_args_is_help=True, help="Save the figures of a run as a small JSON for git, and list or show these."
)


def gate(
    current: Annotated[
        Path | None, typer.Option("--current", metavar="RUN", help="Folder of the run to judge.", show_default=False)
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="BASE", help="A saved baseline (name or file) or a run folder.", show_default=False
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option("--rules", metavar="FILE", help="Rules in TOML.", show_default="default rules, printed"),
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="JUnit XML here too.", show_default="RUN/junit.xml only"),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            "--summary", metavar="FILE", help="Append Markdown, such as to $GITHUB_STEP_SUMMARY.", show_default=False
        ),
    ] = None,
    directory: DirOpt = DIRECTORY,
    force: Annotated[bool, typer.Option("--force", help="Judge although the runs asked for different things.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Inject known regressions and check that the rules catch each.")
    ] = False,
) -> None:
    """Judge a run for CI: 0 pass, 1 regression, 2 usage, 3 invalid or incomparable, 4 inconclusive."""
    from harness.gate_command import gate_command

    raise typer.Exit(
        gate_command(
            current,
            baseline,
            rules,
            junit_file=junit,
            summary=summary,
            folder=directory,
            force=force,
            as_json=as_json,
            self_test_only=self_test,
        )
    )


@baselines.command("save")
def baseline_save(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of it.", show_default="<scenario>-<mode>")] = None,
    directory: DirOpt = DIRECTORY,
    replace: Annotated[bool, typer.Option("--replace", help="Write over a baseline of that name.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Save a partial or unhealthy run all the same.")] = False,
) -> None:
    """Save a run's figures as DIR/NAME.json, to be committed."""
    from harness.baseline_command import save_command

    raise typer.Exit(save_command(run, name, directory, replace=replace, force=force))


@baselines.command("list")
def baseline_list(directory: DirOpt = DIRECTORY) -> None:
    """List the baselines of a folder, a line each."""
    from harness.baseline_command import list_command

    raise typer.Exit(list_command(directory))


@baselines.command("show")
def baseline_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name or file of a baseline.")],
    directory: DirOpt = DIRECTORY,
) -> None:
    """Show the figures of one baseline."""
    from harness.baseline_command import show_command

    raise typer.Exit(show_command(name, directory))


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several make one comparison.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a comparison or an export.", show_default="results/comparison-<time>, RUN/export"
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option("--export", metavar="FORMAT", help="vllm, aiperf or github-action-benchmark.", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No table, only where the files are.")] = False,
) -> None:
    """Render a run again, compare several runs, or export for other tools."""
    from harness.report_command import report_command

    raise typer.Exit(report_command(runs, out=out, export=export, quiet=quiet))


def add_commands(app: typer.Typer) -> None:
    app.command()(gate)
    app.add_typer(baselines, name="baseline")
    app.command()(report)
