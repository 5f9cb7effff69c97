"""The page of `routebench analyze --html`: the verdict, and the three curves that it rests on.

Pure: an analysis in, plots and words out. The figures are those of the terminal; what a plot adds is where your cache
lies on the curve, how long shared prefixes are, and what each further replica costs when placement is random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from reports import Page, Plot, log_ticks
from workloads import Analysis, Verdict

CEILING, RANDOM, RULE = 0, 1, 2
"""Colours, by what a line says: one endless or growing cache, random placement, the rule of thumb."""
LABEL_POINTS = 8
"""So far below the ceiling a line has room for its name."""
METHOD = (
    "Requests are taken in the order in which drivers would send them, each at once with its answer, and counted in "
    "whole blocks; of a prompt the last token is never a hit. Hit rates are shares of prompt tokens.",
    "Cache size: LRU stack distances (Mattson et al. 1970) of all blocks in one pass, so every size is exact. Random "
    "placement: a block that m earlier requests had is on the replica with the chance 1 - (1 - 1/N)^m, in caches "
    "without a limit. The rule of thumb divides by N, which is exact when every prefix was seen once before.",
    "Value: prefill fraction x (achievable - baseline) x shared fraction, the share of capacity that placement by "
    "prefix gains at most: an idle cache is assumed, and eviction and load balance take from it.",
)


def analysis_page(
    what: str,
    found: Analysis,
    verdict: Verdict,
    table: Sequence[tuple[str, str]],
    *,
    replicas: int,
    replica_blocks: int,
) -> Page:
    """`replica_blocks` is one replica's cache in the analysis' blocks."""
    formula = (
        f"{verdict.prefill_fraction:.3f} prefill x ({verdict.achievable:.3f} achievable - {verdict.baseline:.3f} found "
        f"at random) x {verdict.shared_fraction:.3f} shared = {verdict.value:.3f} of capacity."
    )
    return Page(
        kicker="routebench analyze",
        title=what,
        about="What routing on prefixes would be worth for this traffic, before anything is built.",
        verdict="worth it" if verdict.worth_it else "not worth it",
        good=verdict.worth_it,
        sentences=(verdict.text, formula),
        table=table,
        plots=(_by_size(found, replicas, replica_blocks), _lengths(found), _diluted(found, replicas)),
        method=METHOD,
    )


def _by_size(found: Analysis, replicas: int, replica_blocks: int) -> Plot:
    tokens = [blocks * found.block_size for blocks in found.cache_blocks]
    rates = [round(100 * rate, 2) for rate in found.cache_hit_rates]
    marks = [(replica_blocks * found.block_size, "one replica")]
    if replicas > 1:
        marks.append((replicas * replica_blocks * found.block_size, f"{replicas} together"))
    ends = [tokens[0], max(tokens[-1], marks[-1][0])]
    ceiling = round(100 * found.hit_rate, 2)
    axis = log_ticks(ends)
    axis["ticktext"] = [f"{tick:,.0f}" for tick in axis["tickvals"]]
    data = [
        _line("one LRU cache", CEILING, tokens, rates, "%{x:,} tokens: %{y:.1f} %"),
        _line("without a limit", CEILING, ends, [ceiling] * 2, "without a limit: %{y:.1f} %", dash="dot"),
    ]
    layout: dict[str, Any] = {
        "xaxis": {"type": "log", "title": {"text": "tokens in the cache, log scale"}, **axis},
        "yaxis": _percent("hit rate, % of prompt tokens"),
        "shapes": [
            {
                "type": "line",
                "x0": at,
                "x1": at,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"width": 1, "dash": "dash"},
            }
            for at, _ in marks
        ],
        "annotations": [{**_label(at, 1.0, text, CEILING, "center"), "yref": "paper"} for at, text in marks],
        "hovermode": "closest",
    }
    return Plot("hit-rate-by-size", "Hit rate by cache size", "one cache for all requests", data, layout, wide=True)


def _lengths(found: Analysis) -> Plot:
    names = [f"{b.low:,}+" if b.low else "none" for b in found.shared_lengths]
    counts = [b.requests for b in found.shared_lengths]
    shares = [round(100 * count / found.requests, 2) for count in counts]
    data = []
    for worth in (False, True):
        chosen = [i for i, b in enumerate(found.shared_lengths) if (b.low >= found.min_prefix_tokens) == worth]
        data.append(
            {
                "type": "bar",
                "name": f"{found.min_prefix_tokens} tokens or more" if worth else "less",
                "x": [names[i] for i in chosen],
                "y": [shares[i] for i in chosen],
                "customdata": [[found.shared_lengths[i].low, found.shared_lengths[i].high, counts[i]] for i in chosen],
                "hovertemplate": "%{customdata[0]:,} to %{customdata[1]:,} tokens: %{y:.1f} % "
                "(%{customdata[2]:,} requests)<extra></extra>",
                "meta": {"router": CEILING, "faint": not worth},
            }
        )
    layout = {
        "xaxis": {
            "type": "category",
            "categoryarray": names,
            "title": {"text": "tokens in common with a recent request"},
        },
        "yaxis": {"title": {"text": "% of requests"}, "rangemode": "tozero"},
        "barmode": "overlay",
        "hovermode": "closest",
    }
    note = f"with one of the last {found.window_requests:,}; full colour: {found.min_prefix_tokens} tokens or more"
    return Plot("shared-lengths", "Length of shared prefixes", note, data, layout)


def _diluted(found: Analysis, replicas: int) -> Plot:
    counts = [row.replicas for row in found.dilution]
    random = [round(100 * row.hit_rate, 2) for row in found.dilution]
    rule = [round(100 * row.rule_of_thumb, 2) for row in found.dilution]
    ceiling, middle = round(100 * found.hit_rate, 2), len(counts) // 2
    data = [
        _line("placement by prefix", CEILING, [counts[0], counts[-1]], [ceiling] * 2, "by prefix: up to %{y:.1f} %"),
        _line("placed at random", RANDOM, counts, random, "%{x} replicas, at random: %{y:.1f} %", markers=True),
        _line("one cache / N", RULE, counts, rule, "%{x} replicas, one cache / N: %{y:.1f} %", dash="dot"),
    ]
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "replicas, log scale"},
            "tickmode": "array",
            "tickvals": counts,
            "ticktext": [f"<b>{n}</b>" if n == replicas else str(n) for n in counts],
        },
        "yaxis": _percent("hit rate, % of prompt tokens"),
        "annotations": [
            _label(counts[-1], ceiling, "by prefix, at best", CEILING, "right"),
            *(
                _label(counts[middle], values[middle], f" {text}", place, "left")
                for values, text, place in ((random, "at random", RANDOM), (rule, "one cache / N", RULE))
                if values[middle] < ceiling - LABEL_POINTS
            ),
        ],
        "hovermode": "closest",
    }
    return Plot("dilution", "Random placement on N replicas", "caches without a limit", data, layout)


def _line(
    name: str, place: int, x: list[int], y: list[float], hover: str, *, dash: str | None = None, markers: bool = False
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"width": 2.4, **({"dash": dash} if dash else {})},
        "hovertemplate": f"{hover}<extra></extra>",
        "meta": {"router": place},
    }


def _percent(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "range": [0, 101], "dtick": 25}


def _label(x: float, y: float, text: str, place: int, anchor: str) -> dict[str, Any]:
    """Words above a point, in the colour of its line. Places on a log axis are powers for plotly."""
    return {
        "x": math.log10(x),
        "y": y,
        "text": text,
        "showarrow": False,
        "xanchor": anchor,
        "yanchor": "bottom",
        "router": place,
    }
