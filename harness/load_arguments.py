"""What routebench adds to Locust's command line and to the form of its web UI, and what these texts mean.

Knows nothing of Locust but its parser. The form sends every value as text, so nothing here has another type; an empty
one means the default.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.load_plan import PATHS


def add_arguments(parser: Any, **_: Any) -> None:
    """A listener of Locust's `init_command_line_parser`."""
    add = parser.add_argument
    add("--scenario", default="quickstart", help="built-in scenario, or TOML file, that has the workload")
    add("--seed", default="", help="seed of the sessions, a whole number (default: the scenario's)")
    add("--api", choices=["", *PATHS], default="", help="how prompts travel (default: the scenario's)")
    add("--model", default="", help="model name of every request (default: the scenario's)")
    add(
        "--answers",
        choices=["live", "known"],
        default="live",
        help="history takes the answers that come, or those that our mocks are known to give",
    )
    add("--replicas", default="", help="engines behind the router: name=url,name=url (default: what it says)")
    add("--rows-dir", default="", help="folder for raw rows (default: a new temporary one)")
    add("--load", default="", help="changes to the scenario's load, such as driver=rate,rate_per_s=5")
    add(
        "--fail-share-max",
        default="",
        help="exit code 1 if a greater share of requests fails, or none succeeds (default: if any fails)",
    )
    add("--gate", default="", help="rules in a TOML file that the figures must keep; the exit code follows the verdict")
    add(
        "--gate-baseline",
        default="",
        help="run folder, or name or file of a saved baseline, to compare with (without --gate: by the default rules)",
    )
    add("--gate-router", default="", help="the baseline's router to compare with (default: its only one)")
    add(
        "--routebench-plan",
        default=None,
        include_in_web_ui=False,
        help="JSON file with a complete load plan, in place of the arguments above",
    )


def share_max(options: Any) -> float | None:
    """The greatest share of failures that is no failure of the run. Raises UsageError."""
    text = options.fail_share_max
    if not text:
        return None
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"--fail-share-max {text!r}: give a share from 0 to 1, such as 0.01")
    return share


def replicas_of(text: str) -> dict[str, str]:
    """`name=url,name=url` as a mapping. Raises UsageError."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for name, _, url in pairs:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--replicas has {name!r} with the address {url!r}: write name=http://host:port,...")
    return {name.strip(): url.rstrip("/") for name, _, url in pairs}


def whole_number(text: str) -> int:
    if not str(text).isdecimal():
        raise UsageError(f"seed = {text!r}: give a whole number from 0, or leave it empty for the scenario's own")
    return int(text)


def scenario_of(options: Any) -> Any:
    """The scenario that was named, with its changes. Raises UsageError."""
    path = Path(options.scenario)
    return _loaded(options.scenario, options.load, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=4)
def _loaded(name: str, load: str, changed_ns: int) -> Any:
    """Kept, because every start asks again and a worker's heartbeat waits meanwhile; a changed file is read anew."""
    from harness.scenario import load_scenario  # the other rooms' imports are not needed when a plan is given

    return load_scenario(name, overrides=[f"load.{change.strip()}" for change in load.split(",") if change.strip()])
