"""Makes `docs/experiments.md` and its pictures from the built-in scenarios: `python -m harness.experiments_page`.

Every figure on the page is measured in virtual time when the page is made, or named as published.
The page holds no instant and no machine, so the same version gives the same bytes; the straggler map is what takes
minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.experiments import (
    FAILURE_MODES,
    MAP_BLOCKS,
    MAP_REPLICAS,
    MAP_SEEDS,
    SMALL,
    Measured,
    experiment_names,
    measure,
    straggler_map,
)
from harness.experiments_sections import EXTRA, Picture, map_section
from harness.experiments_tables import column_title, table, value_text
from harness.scenario import load_scenario
from harness.svg import bars
from reports import lookup

STRAGGLERS = "rl-rollout-stragglers"
ALWAYS = ("hit_rate", "ttft_ms.p50", "ttft_ms.p99", "output_tokens_per_s")
"""Columns that every experiment's table has after those of its own expectations."""
PANELS_MAX = 3

HEAD = """# Experiments

Made by `python -m harness.experiments_page` from the built-in scenarios; do not edit by hand.

**What is a model and what is measured.** Every figure of ours on this page comes from virtual time: policies,
scheduler, block pool and prefix cache are the objects of the live mode, driven by a clock that jumps. The *length of a
step* is a model (a preset fitted to measured serving points, see its evidence in `mock_engine/presets.toml`); no GPU
was used. The model leaves out the network, tokenisation and the router's own time, which `routing_ms` tells of a live
run. So an order of routers, a placement or a hit rate is a finding about the policies; a millisecond is only as good as
the preset. Figures marked *published* are quoted from the reference texts and were not measured here. A table shows one
run of one seed; what is expected holds with the seeds 1 to 5 as well, but for the affinity sweep, which shows how far
seeds move it, and for the small experiments at the end.

`routebench run NAME --mode sim` repeats an experiment and exits 1 when something is not as expected.
"""


def section(found: Measured, picture: Picture) -> str:
    """One experiment: what it is, its figures, whether they are as expected, and bars of the metrics it is about."""
    scenario = found.scenario
    own = list(dict.fromkeys(expectation.metric for expectation in scenario.expect))
    columns = own + [address for address in ALWAYS if address not in own]
    rows = [
        [name, *(value_text(address, found.figure(name, address)) for address in columns)] for name in found.figures
    ]
    marks = [f"- {'as expected' if f.met else '**not as expected**'}: {f.that}" for f in found.findings]
    panels = [(column_title(address), _panel(found, address)) for address in own[:PANELS_MAX]]
    parts = [
        f"## {scenario.name}",
        f"{scenario.about}.",
        _sizes(found),
        table(["router", *(column_title(address) for address in columns)], rows),
        "\n".join(marks),
        picture(scenario.name, bars(panels)),
    ]
    return "\n\n".join(parts)


def _panel(found: Measured, address: str) -> list[tuple[str, float, str]]:
    known = {name: lookup(figures, address) for name, figures in found.figures.items()}
    return [(name, float(v), value_text(address, v)) for name, v in known.items() if v is not None]


def _sizes(found: Measured) -> str:
    scenario = found.scenario
    load = f"rate {scenario.load.rate_per_s:g}/s" if scenario.load.rate_per_s else f"{scenario.load.slots} slots"
    if scenario.load.arrival == "trace":
        load = "starts as the workload says"
    first = next(iter(found.figures.values()))
    return (
        f"{scenario.fleet.replicas} replicas of {scenario.preset.name} with {scenario.engine.num_gpu_blocks:,} blocks; "
        f"workload `{scenario.workload['kind']}`, {first['requests']:,} requests a router; {load}; "
        f"seed {scenario.seed}."
    )


def failure_section() -> str:
    rows = [
        [mode.symptom, ", ".join(f"[{name}](#{name})" for name in mode.shown_by), ", ".join(map(column_title, seen))]
        for mode in FAILURE_MODES.values()
        for seen in [dict.fromkeys(mode.shown_by.values())]
    ]
    return (
        "## Failure modes of the field\n\nEvery row of the published failure-mode table, the experiment that shows it, "
        f"and the figure in which it is seen.\n\n{table(['symptom', 'experiment', 'seen in'], rows, right=False)}"
    )


def small_section(measured: Sequence[Measured]) -> str:
    """The experiments that two cores carry live."""
    rows = [
        [
            found.scenario.name,
            f"[{name}](#{name})",
            "; ".join(f"{'' if f.met else '**not as expected**: '}{f.that}" for f in found.findings),
        ]
        for found in measured
        for name in [found.scenario.name.removesuffix(SMALL)]
    ]
    return (
        "## Small enough for two cores\n\nThese run live as well (`routebench run NAME`), with real processes, in a "
        "few minutes. Each shows another experiment's fact with its own sizes; what is expected is judged in both "
        "modes.\n\n"
        f"{table(['experiment', 'of', 'as expected in virtual time'], rows, right=False)}"
    )


def make_page(folder: Path, *, seeds: Sequence[int], say: Callable[[str], None]) -> Path:
    """Writes `experiments.md` and `experiments/*.svg` into the folder."""
    pictures = folder / "experiments"
    pictures.mkdir(parents=True, exist_ok=True)

    def picture(name: str, svg: str) -> str:
        (pictures / f"{name}.svg").write_text(svg, "utf-8")
        return f"![{name}](experiments/{name}.svg)"

    parts = [HEAD.rstrip(), failure_section()]
    small = []
    for name in experiment_names():
        say(name)
        found = measure(load_scenario(name))
        if name.endswith(SMALL):
            small.append(found)
            continue
        parts.append(section(found, picture))
        if name in EXTRA:
            parts.append(EXTRA[name](found, picture))
        if name == STRAGGLERS and seeds:
            say(f"map of {len(MAP_REPLICAS)} fleets x {len(MAP_BLOCKS)} cache sizes x {len(seeds)} seeds")
            parts.append(map_section(straggler_map(seeds), picture))
    parts.append(small_section(small))
    page = folder / "experiments.md"
    page.write_text("\n\n".join(parts) + "\n", "utf-8")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="where experiments.md goes (docs)")
    parser.add_argument(
        "--seeds", default=",".join(map(str, MAP_SEEDS)), help="seeds of the straggler map; empty: no map (1,2,3)"
    )
    asked = parser.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",") if seed]
    page = make_page(asked.folder, seeds=seeds, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
