"""Workloads whose requests come together: `waves`, equal requests in phase, and `group-burst`, one prompt many times.

In a wave everybody starts and, lengths being equal, ends at once, so a router that looks at polled figures sends the
whole next wave to where the last one was not. In a burst no replica has the prompt yet when its siblings are placed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from workloads.distributions import Length, Pause, check_sessions, largest
from workloads.limits import SESSIONS_MAX, SOME, Whole, at_least, milliseconds
from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS
from workloads.streams import Streams
from workloads.table import WorkloadTable


class Waves(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run it with as many slots as a wave has requests, or give `every_ms` for waves by the clock."""

    kind: ClassVar[str] = "waves"
    aliases: ClassVar[Mapping[str, str]] = {"input_len": "input_tokens", "output_len": "output_tokens"}
    pauses: ClassVar[tuple[str, ...]] = ("every_ms",)

    waves: int = 4
    wave_size: Length = 64
    """Requests of a wave, each with text of its own."""
    input_tokens: Length = 1000
    """1,000 in and 1,000 out as in the field report behind this kind (llm-d-router issue 298). Spread lengths show how
    soon a closed loop falls out of phase."""
    output_tokens: Length = 1000
    every_ms: Pause = 0.0
    """Time between the starts of two waves; 0: a closed loop, in which the answers of one wave start the next. A
    distribution is always by the clock."""

    def __post_init__(self) -> None:
        at_least("waves", self.waves, 1, SESSIONS_MAX)
        check_sessions("waves", self.waves, "wave_size", self.wave_size)
        super().__post_init__()

    def lengths(self) -> Mapping[str, Whole]:
        return {
            "wave_size": Whole(1, SESSIONS_MAX // self.waves),
            "input_tokens": SOME,
            "output_tokens": SOME,
        }

    def session_count(self, streams: Streams) -> int:
        return self.total("wave_size", self.waves, streams)

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids = streams["workloads.spans"], streams["workloads.session_ids"]
        size, length, output = (self.sampler(name, streams) for name in ("wave_size", "input_tokens", "output_tokens"))
        gap_us = self.pause_sampler_us("every_ms", streams)
        for wave, opens_us in enumerate(_openings_us(self.every_ms, self.waves, gap_us)):
            for number in range(size()):
                new = ((spans.getrandbits(SPAN_ID_BITS), length()),)
                yield Session(
                    session_id=f"wave{wave:03d}-{number:05d}-{ids.getrandbits(32):08x}",
                    turns=(Turn(0, new, (spans.getrandbits(SPAN_ID_BITS), output())),),
                    start_us=opens_us,
                )


class GroupBurst(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults are the field report's: every 10 s, 32 requests with one prompt of 2,048 tokens within 20 ms
    (llm-d-router issue 1726)."""

    kind: ClassVar[str] = "group-burst"
    aliases: ClassVar[Mapping[str, str]] = {"samples_per_prompt": "burst_size", "groups": "bursts"}
    pauses: ClassVar[tuple[str, ...]] = ("every_ms",)

    bursts: int = 6
    burst_size: Length = 32
    """Requests with the same prompt."""
    every_ms: Pause = 10_000.0
    """Time between the starts of two bursts; 0: a closed loop, whose slots take the requests in order. A distribution
    is always by the clock, and what it draws below within_ms is lifted to it, so that bursts do not overlap."""
    within_ms: float = 20.0
    """The requests of a burst fall into this time, drawn alike; the width of a distribution already."""
    prompt_tokens: Length = 2048
    """Length of a burst's prompt, another text for every burst."""
    output_tokens: Length = 128

    def __post_init__(self) -> None:
        at_least("bursts", self.bursts, 1, SESSIONS_MAX)
        check_sessions("bursts", self.bursts, "burst_size", self.burst_size)
        milliseconds("within_ms", self.within_ms)
        super().__post_init__()
        every, where = largest(self.every_ms)
        if every and self.within_ms > every:
            raise ValueError(
                f"within_ms = {self.within_ms:g} is longer than every_ms = {every:g}{where}: bursts would "
                "overlap; shorten within_ms, or give every_ms = 0 for a closed loop"
            )

    def lengths(self) -> Mapping[str, Whole]:
        return {
            "burst_size": Whole(1, SESSIONS_MAX // self.bursts),
            "prompt_tokens": SOME,
            "output_tokens": SOME,
        }

    def session_count(self, streams: Streams) -> int:
        return self.total("burst_size", self.bursts, streams)

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids, arrivals = (streams[f"workloads.{name}"] for name in ("spans", "session_ids", "arrivals"))
        size, length, output = (
            self.sampler(name, streams) for name in ("burst_size", "prompt_tokens", "output_tokens")
        )
        gap_us, within_us = self.pause_sampler_us("every_ms", streams), math.ceil(self.within_ms * 1000)
        openings_us = _openings_us(self.every_ms, self.bursts, lambda: max(gap_us(), within_us))
        for burst, opens_us in enumerate(openings_us):
            prompt = ((spans.getrandbits(SPAN_ID_BITS), length()),)
            offsets_us = sorted(int(arrivals.random() * self.within_ms * 1000) for _ in range(size()))
            for number, offset_us in enumerate(offsets_us):
                yield Session(
                    session_id=f"burst{burst:03d}-{number:03d}-{ids.getrandbits(32):08x}",
                    turns=(Turn(0, prompt, (spans.getrandbits(SPAN_ID_BITS), output())),),
                    group=f"burst-{burst}",
                    start_us=None if opens_us is None else opens_us + offset_us,
                )


def _openings_us(every_ms: Pause, count: int, gap_us: Callable[[], int]) -> Iterator[int | None]:
    """When each wave or burst opens; None in a closed loop. Equal gaps are multiplied and not summed, which would add
    up what rounding leaves."""
    opens_us = 0
    for number in range(count):
        if isinstance(every_ms, int | float):
            yield round(number * every_ms * 1000) if every_ms else None
        else:
            yield opens_us
            opens_us += gap_us()
