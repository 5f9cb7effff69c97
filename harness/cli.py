"""The command line: reads what a user asks, calls what does it, and turns the outcome into an exit code.

`run` exits 0 complete, 1 an expectation of the scenario not met, 2 usage or start failure, 3 invalid health,
130 interrupted with the partial data kept. Errors are one line that names the mend.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harness.calibrate_command import add_calibrate
from harness.environment import package_version
from harness.errors import HarnessError, UsageError, choose_from
from harness.report_cli import add_commands
from harness.scenario import builtin_names, load_scenario, scenario_text

EXIT_USAGE = 2
EXIT_INVALID = 3
EXIT_INTERRUPTED = 130
EXIT_FAULT = 70
"""As sysexits.h calls a fault of the program itself."""
TRACEBACK = "ROUTEBENCH_TRACEBACK"

app = typer.Typer(
    name="routebench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Which LLM router is better, by how much and why: mock vLLM replicas, real routers, Locust load, no GPU.",
)

ScenarioArg = Annotated[
    str,
    typer.Argument(metavar="SCENARIO", help="A built-in name (see `routebench scenarios`) or a path to a TOML file."),
]
RouterOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--router",
        metavar="NAME",
        help="Replaces the scenario's routers; may be repeated. A policy of ours or my_file.py:MyPolicy.",
    ),
]
SetOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Overrides one value of the scenario, such as load.concurrency=8; may be repeated.",
    ),
]
SeedOpt = Annotated[
    int | None, typer.Option(help="Seed of everything that happens by chance.", show_default="the scenario's")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"routebench {package_version('routebench') or '(from a checkout, not installed)'}")
        raise typer.Exit


@app.callback()
def about(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Which LLM router is better, by how much and why: mock vLLM replicas, real routers, Locust load, no GPU."""


@app.command()
def run(
    scenario: ScenarioArg,
    mode: Annotated[
        str,
        typer.Option(
            help="live: real processes. sim: virtual time, the same bytes for the same seed. both: side by side."
        ),
    ] = "live",
    router: RouterOpt = None,
    seed: SeedOpt = None,
    repeats: Annotated[
        int | None, typer.Option(help="How often each router runs, interleaved.", show_default="the scenario's")
    ] = None,
    overrides: SetOpt = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results; must be new or empty.", show_default="results/<scenario>-<time>"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print run.json instead of the table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only, no progress.")] = False,
) -> None:
    """Compare routers: run every router of a scenario on the same sessions, and say which is better and why."""
    from harness.run import run_command

    if mode not in ("live", "sim", "both"):
        raise UsageError(f"--mode {mode}: choose one of live, sim, both")
    checked = load_scenario(scenario, overrides=overrides or (), routers=router or (), seed=seed, repeats=repeats)
    raise typer.Exit(run_command(checked, mode=mode, out=out, as_json=as_json, quiet=quiet))


@app.command()
def serve(
    scenario: ScenarioArg = "quickstart",
    router: Annotated[
        str | None,
        typer.Option("--router", metavar="NAME", help="Which router to start.", show_default="the scenario's first"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the router.", show_default="a free one")] = None,
    overrides: SetOpt = None,
) -> None:
    """Keep a fleet and a router up for experiments by hand, print every address, and stop all on Ctrl-C."""
    from harness.serve import serve_command

    checked = load_scenario(scenario, overrides=overrides or (), routers=[router] if router else ())
    raise typer.Exit(serve_command(checked, port=port))


@app.command()
def check(scenario: ScenarioArg, router: RouterOpt = None, overrides: SetOpt = None) -> None:
    """Validate a scenario and say what it will ask for, without starting anything."""
    from harness.check_command import check_command

    raise typer.Exit(check_command(load_scenario(scenario, overrides=overrides or (), routers=router or ())))


@app.command()
def doctor(
    scenario: Annotated[
        str | None,
        typer.Argument(metavar="[SCENARIO]", help="Whether this one fits.", show_default="quickstart's fleet"),
    ] = None,
    overrides: SetOpt = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only, no progress.")] = False,
) -> None:
    """Find out how many streams this machine carries live, in about 20 seconds, and whether a scenario fits."""
    from harness.doctor import doctor_command

    raise typer.Exit(doctor_command(scenario, overrides or (), as_json=as_json, quiet=quiet))


@app.command()
def scenarios(
    copy: Annotated[
        str | None,
        typer.Option("--copy", metavar="NAME", help="Write a built-in scenario to a file of yours, to edit."),
    ] = None,
    to: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Where --copy writes.")] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys",
            metavar="TABLE",
            help="Explain the keys of a table: load, routers, router, churn, faults, ..., a workload kind, or dist.",
        ),
    ] = None,
) -> None:
    """List the built-in scenarios, a line each; or copy one, or explain what may stand in one."""
    if keys:
        from harness.keys import keys_text

        if copy or to is not None:
            raise UsageError("--keys explains and --copy writes: ask for one of them")
        typer.echo(keys_text(keys, min(Console().width, 100)))
        return
    if copy:
        text, _ = scenario_text(copy)
        target = to or Path(f"{copy}.toml")
        if target.exists():
            raise UsageError(f"{target} exists already: name another file, nothing was written")
        try:
            target.write_text(text, "utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror}") from error
        typer.echo(
            f"wrote {target}; run it with: routebench run ./{target}" if not target.is_absolute() else f"wrote {target}"
        )
        return
    if to is not None:
        raise UsageError(f"{to}: a file is only written with --copy NAME")
    from harness.explain import lines

    typer.echo(lines((name, load_scenario(name).about) for name in builtin_names()))


@app.command()
def routers(name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Explain this one.")] = None) -> None:
    """List the routers, a line each; with a name, say what one believes, needs and takes, and when it fails."""
    from harness.explain import explain_router, list_routers

    if name:
        Console(highlight=False, markup=False).print(explain_router(name))
    else:
        typer.echo(list_routers())


WorkloadSetOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of the workload, such as sample=0.1, speedup=2 or idle_gap_cap_s=10 of a trace; may be repeated.",
    ),
]
FormatOpt = Annotated[
    str | None, typer.Option("--format", help="Of a trace file.", show_default="recognised from its content")
]


@app.command()
def analyze(
    what: Annotated[
        str,
        typer.Argument(metavar="TRACE|SCENARIO|KIND", help="A trace (file or folder), a scenario or a workload kind."),
    ],
    replicas: Annotated[
        int | None, typer.Option(help="Size of the fleet of the verdict.", show_default="the scenario's, else 8")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Step costs of the estimate.", show_default="the scenario's")
    ] = None,
    prefill_fraction: Annotated[
        float | None, typer.Option(help="Measured prefill share of GPU time, 0 to 1.", show_default="estimated")
    ] = None,
    blocks_per_replica: Annotated[
        int | None, typer.Option(help="Cache blocks of a replica.", show_default="no limit")
    ] = None,
    requests_max: Annotated[int | None, typer.Option(help="Stop after so many requests.", show_default="all")] = None,
    trace_format: FormatOpt = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the plots as one page that opens offline.", show_default="none")
    ] = None,
    overrides: WorkloadSetOpt = None,
) -> None:
    """Say before anything is built whether routing on prefixes would pay for a workload or a trace."""
    from harness.analyze_command import analyze_command

    raise typer.Exit(
        analyze_command(
            what,
            trace_format=trace_format,
            replicas=replicas,
            preset_name=preset,
            prefill_fraction=prefill_fraction,
            blocks_per_replica=blocks_per_replica,
            requests_max=requests_max,
            as_json=as_json,
            html=html,
            overrides=overrides or (),
        )
    )


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A trace (file or folder), a scenario or a workload kind.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The native trace to write; a sidecar stands beside it.")],
    trace_format: FormatOpt = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a hash id.", show_default="the trace's own, else 512")
    ] = None,
    overrides: WorkloadSetOpt = None,
) -> None:
    """Write a trace or a workload in the native form (Mooncake rows with sessions)."""
    from harness.analyze_command import convert_command

    found = convert_command(source, out, trace_format=trace_format, block_size=block_size, overrides=overrides or ())
    raise typer.Exit(found)


add_commands(app)
add_calibrate(app)


def run_cli(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code; every error we know is one line on stderr."""
    try:
        code = app(arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if _is_usage_error(error):
            if type(error).__name__ != "NoArgsIsHelpError":  # then the help has been printed
                print(f"error: {_usage_text(error)}", file=sys.stderr)
            return EXIT_USAGE
        # 1 is a verdict of `run` and `gate`: a fault of ours must never look like one.
        if os.environ.get(TRACEBACK):
            raise
        said = str(error) or "no message"
        print(
            f"error: a fault of routebench itself: {type(error).__name__}: {said}; set {TRACEBACK}=1 to see where",
            file=sys.stderr,
        )
        return EXIT_FAULT


def _usage_text(error: Any) -> str:
    """The library's complaint, and where to read what is right."""
    said = str(error.format_message()).rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command_path", "routebench")
    unknown = re.fullmatch(r"No such command '(.*)'", said)
    if unknown:
        names = getattr(getattr(error.ctx, "command", None), "commands", {})
        return f"no command {unknown[1]!r}: {choose_from(unknown[1], names)}"
    return f"{said}; see {command} --help"


def _is_usage_error(error: Exception) -> bool:
    """The command-line library's own complaint about options; newer versions carry their own copy of click."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)
