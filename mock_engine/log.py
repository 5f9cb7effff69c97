"""What a replica writes down for a benchmark: one JSON line a request, one a sample of its load, one a fault.

Lines are written whole and flushed at once, so a killed replica leaves readable files. Instants are microseconds of
the model's clock since its epoch; what is unknown is null.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TextIO

import msgspec

from mock_engine.driver import Driver, percentile
from mock_engine.errors import ConfigError
from mock_engine.streams import Choice

_encode = msgspec.json.Encoder().encode


class JsonLines:
    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(
                f"--mock-log-dir {path.parent}: {error.strerror}; name a folder that can be written"
            ) from error

    def write(self, row: dict[str, Any]) -> None:
        if not self._file.closed:
            self._file.write(_encode(row).decode() + "\n")

    def close(self) -> None:
        self._file.close()


class ReplicaLog:
    """The files of one replica; without a folder nothing is written."""

    def __init__(self, folder: str | None, name: str) -> None:
        self._name = name
        self._requests = None if folder is None else JsonLines(Path(folder) / f"engine-{name}.requests.jsonl")
        self._fleet = None if folder is None else JsonLines(Path(folder) / f"engine-{name}.fleet.jsonl")
        self._folder = folder
        self._faults: JsonLines | None = None  # opened by the first fault

    def ended(self, choice: Choice, how: str) -> None:
        """`how` is length, stop, abort or error."""
        if self._requests is None:
            return
        row: dict[str, Any] = {
            "request_id": choice.reply.client_id,
            "response_id": choice.reply.bodies.response_id,
            "replica": self._name,
            "arrived_us": choice.arrived_us,
            "admitted_us": choice.admitted_us,
            "first_token_us": choice.first_us,
            "last_token_us": choice.last_us,
            "finish": how,
            "prompt_tokens": choice.request.sequence.prompt_tokens,
            "cached_tokens": None if choice.admitted_us is None else choice.cached_tokens,
            "output_tokens": choice.count,
            "preemptions": choice.preemptions,
        }
        if len(choice.reply.choices) > 1:
            row["choice"] = choice.index
        self._requests.write(row)

    def rejected(self, request_id: str, response_id: str, arrived_us: int, prompt_tokens: int | None) -> None:
        if self._requests is None:
            return
        nothing = dict.fromkeys(("admitted_us", "first_token_us", "last_token_us"))
        self._requests.write(
            {
                "request_id": request_id,
                "response_id": response_id,
                "replica": self._name,
                "arrived_us": arrived_us,
                **nothing,
                "finish": "rejected",
                "prompt_tokens": prompt_tokens,
                "cached_tokens": None,
                "output_tokens": 0,
                "preemptions": 0,
            }
        )

    def fault(self, at_us: int, fault: str, details: dict[str, Any]) -> None:
        if self._folder is None:
            return
        if self._faults is None:
            self._faults = JsonLines(Path(self._folder) / f"engine-{self._name}.faults.jsonl")
        self._faults.write({"t_us": at_us, "replica": self._name, "fault": fault, **details})

    @property
    def samples(self) -> bool:
        return self._fleet is not None

    def sample(self, at_us: int, drivers: list[Driver]) -> None:
        if self._fleet is not None:
            self._fleet.write({"t_us": at_us, "replica": self._name, **state(drivers, take=True)})

    def close(self) -> None:
        for file in (self._requests, self._fleet, self._faults):
            if file is not None:
                file.close()


_SUMMED = (
    "running", "waiting", "used_blocks", "cached_blocks", "active_decode_blocks", "hit_tokens", "query_tokens",
    "evicted_blocks", "preemptions",
)  # fmt: skip


def state(drivers: list[Driver], *, take: bool) -> dict[str, Any]:
    """The load of a replica, its ranks added up. `take` starts a new bin for the step figures."""
    found = [driver.snapshot() for driver in drivers]
    durations: list[int] = []
    late: list[int] = []
    for driver in drivers:
        step_us, late_us = driver.take_bin() if take else ([], list(driver.late_us))
        durations += step_us
        late += late_us
    return {
        **{name: sum(getattr(snapshot, name) for snapshot in found) for name in _SUMMED},
        "step_us_mean": round(sum(durations) / len(durations)) if durations else None,
        "late_us_p99": percentile(late, 99),
        "late_us_max": max(late, default=None),
        "steps": sum(snapshot.steps for snapshot in found),
        "cpu_s": round(time.process_time(), 3),
    }
