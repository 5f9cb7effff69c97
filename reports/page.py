"""A page of plots that is no run: words on top, one table, then figures; it opens offline, in light and dark.

It wears the clothes of report.html (style, script and the packed plotly.js), so whoever makes plots as `Plot` gets the
same look and hover. A plot's `meta` colours it as in `reports.plot_parts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from markupsafe import Markup

from reports.html import asset, packed_plotly, page_environment, script_json
from reports.plot_parts import Plot


@dataclass(frozen=True, slots=True)
class Page:
    """What stands on it, from top to bottom."""

    kicker: str
    title: str
    about: str
    verdict: str
    """A word or two for the pill."""
    good: bool
    """Colours the verdict."""
    sentences: Sequence[str]
    table: Sequence[tuple[str, str]]
    plots: Sequence[Plot]
    method: Sequence[str]
    """How the figures were made, a paragraph each."""


def write_page(page: Page, path: Path | str) -> None:
    """Writes one self-contained file. Raises OSError."""
    text = (
        page_environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            figures=script_json([asdict(plot) for plot in page.plots]),
            style=asset("report.css"),
            code=asset("report.js"),
            plotly=Markup(packed_plotly()),
        )
    )
    Path(path).write_text(text, encoding="utf-8", newline="\n")
