"""How a number is written for people: unit, decimals, sign. JSON never passes through here.

The same figure reads the same on the terminal, in Markdown and in HTML. Unknown is a dash, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reports.metrics_table import lookup, metric_of

UNKNOWN = "–"
_STATISTIC = {"mean": "mean", "max": "max", "count": "samples"}
_PART = {"decode_blocks": "decode", "waiting": "waiting", "max_share": "largest share"}


def label(address: str) -> str:
    """`ttft_ms.p99` as "TTFT p99"."""
    metric = metric_of(address)
    part = address.partition(".")[2]
    if metric.name in ("load_cv", "placement"):
        return f"{metric.title}, {_PART.get(part, part)}"
    return f"{metric.title} {_STATISTIC.get(part, part)}".rstrip()


def phrase(address: str) -> str:
    """The label inside a sentence: "session end to end p99", but "TTFT p99"."""
    words = label(address)
    return words if words[:2].isupper() else words[0].lower() + words[1:]


def unit(address: str) -> str:
    metric = metric_of(address)
    if address.endswith(".count"):
        return "samples"
    return "%" if metric.unit == "share" or address == "placement.max_share" else metric.unit


def row_label(address: str) -> tuple[str, str]:
    """The label and the unit to stand behind it; no unit where the label has it or the figure is a bare number."""
    shown = unit(address)
    return label(address), "" if shown in ("cv", "ratio", "count", "requests", "tokens/s", "1/s") else shown


def number(value: float | int, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.,") else text


def value_text(address: str, value: float | int | None) -> str:
    """Without the unit, which stands beside it; large figures lose decimals that nobody reads."""
    if value is None:
        return UNKNOWN
    metric = metric_of(address)
    if unit(address) == "%":
        return number(100 * value, metric.decimals or 1)
    if unit(address) == "samples":
        return number(value, 0)
    decimals = metric.decimals
    while decimals and abs(value) >= 10 ** (5 - decimals):
        decimals -= 1
    return number(value, decimals)


def with_unit(address: str, value: float | int | None) -> str:
    if value is None:
        return "unknown"
    shown = unit(address)
    text = value_text(address, value)
    return f"{text} {shown}" if shown not in ("count", "cv") else text


def cell(metrics: Mapping[str, Any], address: str) -> str:
    return value_text(address, lookup(metrics, address))


def percent(fraction: float | None, signed: bool = False) -> str:
    if fraction is None:
        return UNKNOWN
    text = number(100 * fraction, 1 if abs(fraction) < 10 else 0)
    return f"{'+' if signed and fraction > 0 and text.strip('0.') else ''}{text} %"


def shares(placement: Mapping[str, int] | None) -> str:
    """Placement as percent per replica in replica order: "26/24/25/25". Beyond eight replicas the extremes only."""
    if not placement or not sum(placement.values()):
        return UNKNOWN
    total = sum(placement.values())
    parts = [f"{100 * count / total:.0f}" for count in placement.values()]
    if len(parts) <= 8:
        return "/".join(parts)
    return f"{100 * min(placement.values()) / total:.1f} to {100 * max(placement.values()) / total:.1f}"


def in_markdown(text: str) -> str:
    """A text from outside inside a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def join(words: list[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}" if words else ""
