"""Pictures as SVG text, drawn by hand: bars, lines over named places, and a map of cells.

Plain shapes on a white ground, so that a picture looks the same in a light and a dark page and needs no script.
Coordinates are rounded to a tenth, so that the same figures give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH = 720
_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#475569", "#0891b2", "#be185d")
_INK, _FAINT = "#1f2933", "#d5dbe1"
_LINE = 22


def bars(panels: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """Panels under one another, each a title and rows of (name, value, value as text); every panel has its scale."""
    parts: list[str] = []
    y = 0.0
    for title, rows in panels:
        parts.append(_text(12, y + 20, title, weight="bold"))
        y += 30
        largest = max((value for _, value, _ in rows), default=0) or 1
        for place, (name, value, text) in enumerate(rows):
            length = max(0.0, value) / largest * (WIDTH - 300)
            parts.append(_text(188, y + 14, name, anchor="end"))
            parts.append(_rect(196, y + 3, max(length, 1.0), 15, _COLOURS[place % len(_COLOURS)]))
            parts.append(_text(202 + length, y + 15, text))
            y += _LINE
        y += 10
    return _document(y + 4, parts)


def lines(
    title: str, places: Sequence[str], series: Sequence[tuple[str, Sequence[float], bool]], *, log: bool = False
) -> str:
    """Lines of (name, values, dashed) over named places, evenly spaced; a value that is no number breaks its line."""
    left, top, height = 64, 44, 250
    right = WIDTH - 190
    known = [v for _, values, _ in series for v in values if math.isfinite(v)]
    low, high = (min(known) * 0.8, max(known) * 1.2) if log else (0.0, max(known) * 1.08 or 1.0)

    def at(place: int, value: float) -> tuple[float, float]:
        part = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return left + (right - left) * place / max(1, len(places) - 1), top + height * (1 - part)

    parts = [_text(12, 22, title, weight="bold")]
    for tick in _ticks(low, high, log=log):
        y = at(0, tick)[1]
        parts.append(_rule(left, y, right, y, _FAINT))
        parts.append(_text(left - 6, y + 4, f"{tick:,.0f}" if tick >= 1000 else f"{tick:g}", anchor="end"))
    step = max(1, -(-len(places) // 12))
    for place, name in enumerate(places):
        if place % step == 0:
            parts.append(_text(at(place, high)[0], top + height + 20, name, anchor="middle"))
    for number, (name, values, dashed) in enumerate(series):
        colour = _COLOURS[number // 2 % len(_COLOURS)] if _paired(series) else _COLOURS[number % len(_COLOURS)]
        style = ' stroke-dasharray="5 4"' if dashed else ""
        for run in _runs(values):
            points = " ".join("{:.1f},{:.1f}".format(*at(place, values[place])) for place in run)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{style}/>')
        y = top + 14 + number * _LINE
        parts.append(f'<path d="M{right + 14:.1f} {y - 4:.1f}h22" stroke="{colour}" stroke-width="2"{style}/>')
        parts.append(_text(right + 42, y, name))
    return _document(top + height + 34, parts)


def cell_map(
    title: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[tuple[str, float]]]
) -> str:
    """A map of (text, share from 0 to 1) cells; the share sets how green a cell is."""
    left, top, wide, high = 110, 56, (WIDTH - 130) / max(1, len(columns)), 44
    parts = [_text(12, 22, title, weight="bold")]
    for place, name in enumerate(columns):
        parts.append(_text(left + (place + 0.5) * wide, top - 8, name, anchor="middle"))
    for line, (name, row) in enumerate(zip(rows, cells, strict=True)):
        y = top + line * high
        parts.append(_text(left - 10, y + high / 2 + 4, name, anchor="end"))
        for place, (text, share) in enumerate(row):
            parts.append(_rect(left + place * wide + 1, y + 1, wide - 2, high - 2, _shade(share)))
            parts.append(_text(left + (place + 0.5) * wide, y + high / 2 + 4, text, anchor="middle"))
    return _document(top + len(rows) * high + 10, parts)


def _paired(series: Sequence[tuple[str, Sequence[float], bool]]) -> bool:
    """Whether every solid line has a dashed one after it, which then shares its colour."""
    return [dashed for _, _, dashed in series] == [False, True] * (len(series) // 2) and len(series) > 1


def _runs(values: Sequence[float]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for place, value in enumerate(values):
        if math.isfinite(value):
            runs[-1].append(place)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    rough = high / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough)
    return [n * step for n in range(int(high / step) + 1)]


def _shade(share: float) -> str:
    share = min(1.0, max(0.0, share))
    none, full = (250, 219, 216), (171, 223, 190)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(none, full, strict=True))


def _rect(x: float, y: float, wide: float, high: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{colour}"/>'


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{_INK}">'
        f"{escape(text)}</text>"
    )


def _document(height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="system-ui, sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )
