"""Figures and tables of the experiments' page as Markdown text."""

from __future__ import annotations

from collections.abc import Sequence

from reports import metric_of


def value_text(address: str, value: float | int | None) -> str:
    """A figure with the decimals and unit of its metric; shares as percent."""
    if value is None:
        return "-"
    metric = metric_of(address)
    if metric.unit == "share" or address.endswith(".max_share"):
        return f"{100 * value:.1f} %"
    decimals = 0 if abs(value) >= 1000 else metric.decimals
    unit = f" {metric.unit}" if metric.unit in ("ms", "points", "tokens", "blocks") else ""
    return f"{value:,.{decimals}f}{unit}"


def column_title(address: str) -> str:
    metric = metric_of(address)
    _, _, part = address.partition(".")
    return f"{metric.title} {part.replace('_', ' ')}".strip()


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = True) -> str:
    """A Markdown table; columns after the first are numbers, which stand right, unless said otherwise."""
    out = ["| " + " | ".join(head) + " |", "| --- |" + (" ---: |" if right else " --- |") * (len(head) - 1)]
    return "\n".join(out + ["| " + " | ".join(row) + " |" for row in rows])
