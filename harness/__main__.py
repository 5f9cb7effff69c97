"""Entry of the `routebench` command: checks that our packages are ours, then hands over to the command line."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def main() -> None:
    """Runs the command line; the only place, with the commands it calls, that ends the process."""
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal without our signs shows others, instead of ending a run
        sys.stdout.reconfigure(errors="replace")
    from harness.rooms import stranger

    found = stranger()
    if found:
        print(f"error: {found}", file=sys.stderr)
        raise SystemExit(2)
    try:
        from harness.cli import run_cli

        code = run_cli()
    except KeyboardInterrupt:  # before a command could take care of it itself
        code = 130
    raise SystemExit(code)


if __name__ == "__main__":
    main()
