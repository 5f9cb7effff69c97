"""A tab in Locust's web UI: TTFT, TPOT and hit rate while a test runs, over all requests and per replica.

The first two rows are what the load generator measured, over the whole test and over its last seconds; the others are
what each engine says of itself since the test began, read from its `/metrics`. Which engines there are is given, or
asked of a router of ours. Nothing here is a measurement; the rows are.
"""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import gevent
import msgspec

from harness.live_figures import WINDOW_S, Figures, Window, engine_figures, quantile_ms

KEY = "routebench"
POLL_S = 2.0
"""As often as Locust's page asks for its table."""
TIMEOUT_S = 1.0
UNKNOWN = "–"
COLUMNS = {
    "where": "Where",
    "requests": "Requests",
    "failed": "Failed",
    "ttft": "TTFT mean (ms)",
    "ttfthalf": "TTFT p50 (ms)",
    "ttfttail": "TTFT p99 (ms)",
    "tpot": "TPOT mean (ms)",
    "tpothalf": "TPOT p50 (ms)",
    "tpottail": "TPOT p99 (ms)",
    "hits": "Hit rate",
    "running": "Running",
    "waiting": "Waiting",
    "usage": "KV used",
}


class WebTab:
    """Adds the tab to a web UI; `begin` starts a test, `figures` is what its requests add up to."""

    def __init__(self, web_ui: Any) -> None:
        self.figures = Figures()
        self._window = Window()
        self._recent = Figures()
        self._engines: dict[str, dict[str, float]] = {}
        self._before: dict[str, dict[str, float]] = {}
        self._poll: Any = None
        structure = [{"key": key, "title": title} for key, title in COLUMNS.items()]
        web_ui.template_args["extended_tabs"] = [
            *web_ui.template_args.get("extended_tabs", ()),
            {"title": "Routebench", "key": KEY},
        ]
        web_ui.template_args["extended_tables"] = [
            *web_ui.template_args.get("extended_tables", ()),
            {"key": KEY, "structure": structure},
        ]
        web_ui.app.after_request(self._extend)

    def begin(self, figures: Figures, replicas: dict[str, str], router: str | None) -> None:
        """A test starts; engines are those given or those that the router names."""
        self.end()
        self.figures, self._window, self._recent = figures, Window(), Figures()
        self._engines, self._before = {}, {}
        self._poll = gevent.spawn(self._follow, replicas, router)

    def end(self) -> None:
        if self._poll is not None:
            self._poll.kill()

    def table(self) -> list[dict[str, str]]:
        """The rows of the tab as text."""
        rows = [_client_row("all requests", self.figures), _client_row(f"last {WINDOW_S:g} s", self._recent)]
        return rows + [_engine_row(name, figures, self._before[name]) for name, figures in self._engines.items()]

    def _follow(self, replicas: dict[str, str], router: str | None) -> None:
        while True:
            self._recent = self._window.note(time.monotonic(), self.figures)
            replicas = replicas or _replicas_of(router)
            answers = [(name, gevent.spawn(_read, f"{url}/metrics")) for name, url in replicas.items()]
            gevent.joinall([answer for _, answer in answers])
            for name, answer in answers:
                if answer.value is not None:
                    self._engines[name] = engine_figures(answer.value.decode("utf-8", "replace"))
                    self._before.setdefault(name, self._engines[name])
            gevent.sleep(POLL_S)

    def _extend(self, response: Any) -> Any:
        from flask import request  # comes with Locust; only a process with a web UI needs it

        if request.path.endswith("/stats/requests") and response.is_json:
            body = response.get_json()
            others = [t for t in body.get("extended_stats", ()) if t["key"] != KEY]  # Locust hands out an answer twice
            body["extended_stats"] = [*others, {"key": KEY, "data": self.table()}]
            response.set_data(json.dumps(body))
        return response


def _client_row(where: str, figures: Figures) -> dict[str, str]:
    return _row(
        where=where,
        requests=str(figures.counts["ok"] + figures.counts["failed"]),
        failed=str(figures.counts["failed"]),
        ttft=_ms(figures.mean_ms("ttft")),
        ttfthalf=_ms(quantile_ms(figures.ttft, 0.5)),
        ttfttail=_ms(quantile_ms(figures.ttft, 0.99)),
        tpot=_ms(figures.mean_ms("tpot")),
        tpothalf=_ms(quantile_ms(figures.tpot, 0.5)),
        tpottail=_ms(quantile_ms(figures.tpot, 0.99)),
        hits=_percent(figures.hit_rate),
    )


def _engine_row(name: str, now: dict[str, float], before: dict[str, float]) -> dict[str, str]:
    def grown(key: str) -> float:
        return now.get(key, 0.0) - before.get(key, 0.0)

    def mean(total: str, count: str) -> float | None:
        return grown(total) / grown(count) if grown(count) > 0 else None

    ttft, tpot = mean("ttft_s", "ttft_n"), mean("tpot_s", "tpot_n")
    return _row(
        where=name,
        requests=f"{grown('ttft_n'):.0f}" if "ttft_n" in now else UNKNOWN,
        ttft=_ms(ttft and ttft * 1000),
        tpot=_ms(tpot and tpot * 1000),
        hits=_percent(mean("hits", "queries")),
        running=f"{now['running']:.0f}" if "running" in now else UNKNOWN,
        waiting=f"{now['waiting']:.0f}" if "waiting" in now else UNKNOWN,
        usage=_percent(now.get("kv_usage")),
    )


def _row(**known: str) -> dict[str, str]:
    return {key: known.get(key, UNKNOWN) for key in COLUMNS}


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.1f}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def _replicas_of(router: str | None) -> dict[str, str]:
    """Names and addresses of the engines behind a router of ours; none for another's."""
    body = _read(f"{router}/router/state") if router else None
    try:
        found = msgspec.json.decode(body or b"{}").get("replicas", ())
        return {entry["name"]: entry["url"].rstrip("/") for entry in found}
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        return {}


def _read(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read())
    except (OSError, ValueError):
        return None
