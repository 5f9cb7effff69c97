"""Every served point that the calibrated presets were fitted to, served by our engine in virtual time.

    python benchmarks/presets.py [--preset NAME] [--points]

Errors in percent, mean/worst: against the measurement, and against an independent discrete-event model with the same
coefficients. `stated` is what the preset's evidence says. The test suite serves a sample of these points.
"""

from __future__ import annotations

import argparse
import time

from mock_engine import load_preset
from mock_engine.tests.served_table import Compared, compare, error_pct, rows


def pair(values: list[tuple[float, float, float]], against: int) -> str:
    errors = [error_pct(value, against) for value in values]
    return f"{sum(errors) / len(errors):.1f}/{max(errors):.0f}"


def print_points(points: list[Compared]) -> None:
    for point in points:
        ttft, tpot = point.ttft_ms, point.tpot_ms
        print(
            f"    isl {point.isl:5} osl {point.osl:5} x {point.concurrency:3}: "
            f"TTFT {ttft[0]:8.1f} measured {ttft[2]:8.1f} ours, TPOT {tpot[0]:7.2f} measured {tpot[2]:7.2f} ours"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="only this one")
    parser.add_argument("--points", action="store_true", help="print every point")
    args = parser.parse_args()
    names = sorted({row["preset"] for row in rows("serving_closed.csv")})
    if args.preset and args.preset not in names:
        parser.error(f"no served points of {args.preset!r}: choose one of {', '.join(names)}")
    start = time.perf_counter()
    print(f"{'':28}{'points':>7}{'TTFT':>9}{'stated':>9}{'TPOT':>9}{'stated':>9}{'TTFT, model':>13}{'TPOT, model':>13}")
    for name in [args.preset] if args.preset else names:
        points = compare(lambda row, name=name: row["preset"] == name)
        ttfts, tpots = [point.ttft_ms for point in points], [point.tpot_ms for point in points]
        stated = load_preset(name).evidence
        print(
            f"{name:28}{len(points):7}"
            f"{pair(ttfts, 0):>9}{stated.ttft_mean_abs_pct:>6.1f}/{stated.ttft_worst_pct:.0f}"
            f"{pair(tpots, 0):>9}{stated.tpot_mean_abs_pct:>6.1f}/{stated.tpot_worst_pct:.0f}"
            f"{pair(ttfts, 1):>13}{pair(tpots, 1):>13}"
        )
        if args.points:
            print_points(points)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
