"""What single experiments show besides the table that every one has: the page's sections on one of them.

Each takes what was measured and a function that writes a picture and gives its Markdown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from harness.experiments import (
    MapCell,
    Measured,
    SweepRow,
    measure,
    moved_sessions,
    stale_until_us,
    sweep_rows,
)
from harness.experiments_tables import table, value_text
from harness.scenario import load_scenario
from harness.svg import cell_map, lines

Picture = Callable[[str, str], str]
SPREAD_SEEDS = (2, 3, 4, 5)
"""Seeds with which the affinity sweep is shown besides its own."""
NEAR = 0.15
"""A cell of the sweep is near the published one up to this deviation."""
CLOCK_OFF = "workload.timestamp_prefix=false"


def sweep_section(found: Measured, picture: Picture) -> str:
    """The sweep beside the published table, with how far each cell is off."""
    rows = sweep_rows(found)
    cells = []
    for row in rows:
        hit, p50, p99 = row.published
        off = row.deviations()
        cells.append(
            [
                _ratio(row),
                f"{hit:g} %",
                f"{row.hit_percent:.0f} % ({off[0]:+.0%})",
                f"{row.token_hit_percent:.0f} %",
                f"{row.hit_rate_percent:.0f} %",
                f"{p50:,.0f}",
                f"{row.p50_ms:,.0f} ({off[1]:+.0%})",
                f"{p99:,.0f}",
                f"{row.p99_ms:,.0f} ({off[2]:+.0%})",
            ]
        )
    head = ["w_cache / w_load", "hit, published", "hit, ours", "by tokens", "hit_rate", "p50, published", "p50, ours"]
    near = sum(abs(value) <= NEAR for row in rows for value in row.deviations())
    charts = "\n".join(
        [
            picture(f"{found.scenario.name}-ttft", _sweep_chart(rows)),
            picture(f"{found.scenario.name}-hits", _hit_chart(rows)),
        ]
    )
    text = (
        f"The published table, cell by cell; TTFT in ms. **{near} of {3 * len(rows)} cells are within 15 %.** Hits, "
        "ours: the share of later turns that found all of their history that a cache can hold, which is what the "
        "reference text's 1/N is about. *By tokens* is the share of those histories' tokens, and *hit_rate* that of "
        "all prompt tokens. 70 % prefix sharing: 70 % of the requests are later turns, with a prefix sent before."
    )
    compared = table([*head, "p99, published", "p99, ours"], cells)
    return "\n\n".join([text, compared, sweep_words(rows), spread_words(found.scenario.name), charts])


def sweep_words(rows: Sequence[SweepRow]) -> str:
    """What the deviations say, from the figures themselves."""
    names = ("hit rate", "p50", "p99")
    off = [
        f"the {name} at {_ratio(row)} ({value:+.0%})"
        for row in rows
        for name, value in zip(names, row.deviations(), strict=True)
        if abs(value) > NEAR
    ]
    foot = min(rows, key=lambda row: row.p99_ms)
    quick = min(rows, key=lambda row: row.p50_ms)
    return (
        f"Further off: {', '.join(off) or 'none'}. Our p99 has its foot at ratio {_ratio(foot)} (published: 0.3), our "
        f"p50 at {_ratio(quick)} (published: ∞). Why not nearer: the two figures at ∞ pull against each other. What "
        "makes the queue of the overloaded replica longer, which the published p99 asks for, also slows the half of "
        "the requests that the median looks at, which the published p50 says is served at once; a few replicas that "
        "drown while the others idle need a skew that was not published. And whatever lowers the tail at ratio 0 "
        "lowers it more where hits save work."
    )


def spread_words(name: str) -> str:
    """How far the sweep's figures move from seed to seed."""
    runs = [sweep_rows(measure(load_scenario(name, seed=seed))) for seed in SPREAD_SEEDS]
    rows = []
    for same in zip(*runs, strict=True):
        figures = ([r.hit_percent for r in same], [r.p50_ms for r in same], [r.p99_ms for r in same])
        rows.append([_ratio(same[0]), *(f"{min(values):,.0f} to {max(values):,.0f}" for values in figures)])
    seeds = ", ".join(map(str, SPREAD_SEEDS))
    return (
        "The sizes were searched for with one seed, some two hundred points in all, and the cells above are the best "
        "case: the fleet is close to saturation, where another draw of the same arrivals can be too much for it. With "
        f"the seeds {seeds} the same scenario gives:\n\n"
        + table(["w_cache / w_load", "hit, %", "p50, ms", "p99, ms"], rows)
    )


def _ratio(row: SweepRow) -> str:
    return "∞" if math.isinf(row.ratio) else f"{row.ratio:g}"


def _sweep_chart(rows: Sequence[SweepRow]) -> str:
    series = [
        ("p50, ours", [row.p50_ms for row in rows], False),
        ("p50, published", [row.published[1] for row in rows], True),
        ("p99, ours", [row.p99_ms for row in rows], False),
        ("p99, published", [row.published[2] for row in rows], True),
    ]
    return lines("TTFT in ms against w_cache / w_load", [_ratio(row) for row in rows], series, log=True)


def _hit_chart(rows: Sequence[SweepRow]) -> str:
    series = [
        ("hits, ours", [row.hit_percent for row in rows], False),
        ("hits, published", [row.published[0] for row in rows], True),
    ]
    return lines("Hit rate in percent against w_cache / w_load", [_ratio(row) for row in rows], series)


def map_section(cells: Sequence[MapCell], picture: Picture) -> str:
    """For which fleet and cache sizes the published order of the straggler experiment holds."""
    by_size = {(cell.replicas, cell.blocks): cell for cell in cells}
    fleets = sorted({cell.replicas for cell in cells})
    sizes = sorted({cell.blocks for cell in cells})
    shown = [[by_size[replicas, blocks] for blocks in sizes] for replicas in fleets]
    drawn = cell_map(
        "Published order: seeds in which it holds (p99 of dynamo-kv over the better other)",
        [f"{replicas} replicas" for replicas in fleets],
        [f"{blocks:,} blocks" for blocks in sizes],
        [[(f"{c.holds}/{c.seeds} ({c.tail_ratio:.2f})", c.holds / c.seeds) for c in row] for row in shown],
    )
    rows = [
        [
            str(cell.replicas),
            f"{cell.blocks:,}",
            f"{cell.holds} of {cell.seeds}",
            f"{cell.best_tail} of {cell.seeds}",
            f"{cell.lowest_hits} of {cell.seeds}",
            f"{cell.tail_ratio:.2f}",
        ]
        for row in shown
        for cell in row
    ]
    whole = sum(cell.holds == cell.seeds for cell in cells)
    tail = sum(cell.best_tail == cell.seeds for cell in cells)
    broken = sorted(cell.replicas * cell.blocks for cell in cells if cell.holds < cell.seeds)
    band = (
        f" It breaks only where the caches of the fleet together have {broken[0]:,} to {broken[-1]:,} blocks: with "
        "less and with more the published order is found."
        if broken and all(c.holds == c.seeds or broken[0] <= c.replicas * c.blocks <= broken[-1] for c in cells)
        else ""
    )
    text = (
        "**Where the published order holds.** It has two halves: the KV- and load-aware router has the best p99 "
        "rollout time, and the lowest hit rate. The map varies the fleet and each replica's cache and leaves all "
        f"else, 16 rollouts in flight included. In {whole} of {len(cells)} sizes both halves hold in every seed, in "
        f"{tail} the first does.{band} Where only the first half holds, the aware router wins the tail and does not "
        "even pay for it in hits."
    )
    head = ["replicas", "blocks", "order holds", "best p99", "lowest hit rate", "p99 / better other"]
    return "\n\n".join([text, picture("rl-rollout-stragglers-map", drawn), table(head, rows)])


def thrash_section(found: Measured, picture: Picture) -> str:
    """Windowed hit rate of every engine over time: the spiral itself."""
    router = next(iter(found.figures))
    samples = found.fleet[router]
    times = sorted({sample["t_us"] for sample in samples})
    edges = [times[round(i * (len(times) - 1) / 24)] for i in range(25)]
    series = []
    for replica in found.scenario.fleet.names:
        at = {s["t_us"]: (s["hit_tokens"], s["query_tokens"]) for s in samples if s["replica"] == replica}
        rates = []
        for before, after in pairwise(edges):
            asked = at[after][1] - at[before][1]
            rates.append(100 * (at[after][0] - at[before][0]) / asked if asked else math.nan)
        series.append((replica, rates, False))
    places = [f"{edge / 1e6:.0f} s" for edge in edges[1:]]
    return picture(
        f"{found.scenario.name}-windows", lines(f"{router}: hit rate of each engine, percent", places, series)
    )


def clock_section(found: Measured) -> str:
    """The same traffic without the clock in front."""
    clean = measure(load_scenario(found.scenario.name, overrides=[CLOCK_OFF]))
    rows = [
        [
            name,
            *(
                value_text(address, run.figure(name, address))
                for address in ("hit_rate", "ttft_ms.p50")
                for run in (found, clean)
            ),
        ]
        for name in found.figures
    ]
    head = ["router", "hit rate, clock", "hit rate, none", "TTFT p50, clock", "TTFT p50, none"]
    return f"The same traffic without the clock (`--set {CLOCK_OFF}`):\n\n" + table(head, rows)


def growth_section(found: Measured, picture: Picture) -> str:
    """The size of every router's index over time."""
    last_us = max(sample["t_us"] for samples in found.routers.values() for sample in samples)
    edges = [last_us * i // 24 for i in range(1, 25)]
    series = []
    for router, samples in found.routers.items():
        sizes = {sample["t_us"]: sample["index_size"] for sample in samples if sample["index_size"]}
        until = [[size for t_us, size in sizes.items() if t_us <= edge] for edge in edges]
        series.append((router, [float(seen[-1]) if seen else math.nan for seen in until], False))
    chart = lines("Entries of the index over time", [f"{edge / 1e6:.0f} s" for edge in edges], series, log=True)
    return "Entries are characters of text in the two trees, blocks in the other.\n\n" + picture(
        f"{found.scenario.name}-time", chart
    )


WINDOW_US = 2_500_000


def churn_section(found: Measured, picture: Picture) -> str:
    """Who moved because of each thing that happened to a replica, and what later turns were served meanwhile."""
    events = found.scenario.churn
    ends = [after.at_us for after in events[1:]] + [1 << 62]
    rows = []
    for router, requests in found.requests.items():
        cells = []
        for event, end in zip(events, ends, strict=True):
            moved, sessions = moved_sessions(requests, event.at_us, end)
            cells.append(f"{moved} of {sessions} ({moved / max(1, sessions):.0%})")
        rows.append([router, *cells])
    head = ["sessions that moved", *(event.describe() for event in events)]
    last_us = max(row["sent_us"] for requests in found.requests.values() for row in requests if row.get("sent_us"))
    edges = range(0, last_us, WINDOW_US)
    series = [(router, [_served(requests, at) for at in edges], False) for router, requests in found.requests.items()]
    chart = lines("Hit rate of later turns, percent", [f"{at / 1e6:g} s" for at in edges], series)
    return table(head, rows) + "\n\n" + picture(f"{found.scenario.name}-time", chart)


def _served(requests: Sequence[Mapping[str, Any]], from_us: int) -> float:
    """Hit rate, in percent, of the later turns that were sent in one window."""
    inside = [
        row
        for row in requests
        if row["turn"] and row["status"] == "ok" and from_us <= row["sent_us"] < from_us + WINDOW_US
    ]
    asked = sum(row["prompt_tokens"] for row in inside)
    return 100 * sum(row["cached_tokens"] for row in inside) / asked if asked else math.nan


def restart_section(found: Measured, picture: Picture) -> str:
    """How long each router went on expecting hits of the process that is gone."""
    event = found.scenario.churn[0]
    rows = []
    for router, requests in found.requests.items():
        until_us = stale_until_us(requests, event.at_us)
        lasted = "-" if until_us is None else f"{(until_us - event.at_us) / 1e6:.1f} s"
        rows.append([router, value_text("stale_placements", found.figure(router, "stale_placements")), lasted])
    return table([event.describe(), "stale placements", "the last one after"], rows)


EXTRA: dict[str, Callable[[Measured, Picture], str]] = {
    "affinity-load-sweep": sweep_section,
    "cache-thrash": thrash_section,
    "index-growth": growth_section,
    "replica-churn": churn_section,
    "replica-crash": churn_section,
    "restart-in-place": restart_section,
    "scale-down": churn_section,
    "timestamp-prefix": lambda found, _: clock_section(found),
}
"""What follows an experiment's own section, by its name."""
