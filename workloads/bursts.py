"""Workloads whose requests come together: `waves`, equal requests in phase, and `group-burst`, one prompt many times.

In a wave everybody starts and, lengths being equal, ends at once, so a router that looks at polled figures sends the
whole next wave to where the last one was not. In a burst no replica has the prompt yet when its siblings are placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from workloads.distributions import Length, check_length, length_sampler
from workloads.limits import SESSIONS_MAX, TOKENS_MAX, at_least, milliseconds, sessions
from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS
from workloads.streams import Streams
from workloads.table import WorkloadTable


class Waves(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run it with as many slots as a wave has requests, or give `every_ms` for waves by the clock."""

    kind: ClassVar[str] = "waves"
    aliases: ClassVar[Mapping[str, str]] = {"input_len": "input_tokens", "output_len": "output_tokens"}

    waves: int = 4
    wave_size: int = 64
    """Requests of a wave, each with text of its own."""
    input_tokens: int = 1000
    """1,000 in and 1,000 out as in the field report behind this kind (llm-d-router issue 298)."""
    output_tokens: int = 1000
    every_ms: float = 0.0
    """Time between the starts of two waves; 0: a closed loop, in which the answers of one wave start the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("waves", "wave_size", "input_tokens", "output_tokens"):
            at_least(name, getattr(self, name), 1, TOKENS_MAX if name.endswith("tokens") else SESSIONS_MAX)
        milliseconds("every_ms", self.every_ms)
        sessions("waves x wave_size", self.session_count)

    @property
    def session_count(self) -> int:
        return self.waves * self.wave_size

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids = streams["workloads.spans"], streams["workloads.session_ids"]
        for wave in range(self.waves):
            for number in range(self.wave_size):
                new = ((spans.getrandbits(SPAN_ID_BITS), self.input_tokens),)
                yield Session(
                    session_id=f"wave{wave:03d}-{number:05d}-{ids.getrandbits(32):08x}",
                    turns=(Turn(0, new, (spans.getrandbits(SPAN_ID_BITS), self.output_tokens)),),
                    start_us=round(wave * self.every_ms * 1000) if self.every_ms else None,
                )


class GroupBurst(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults are the field report's: every 10 s, 32 requests with one prompt of 2,048 tokens within 20 ms
    (llm-d-router issue 1726)."""

    kind: ClassVar[str] = "group-burst"
    aliases: ClassVar[Mapping[str, str]] = {"samples_per_prompt": "burst_size", "groups": "bursts"}

    bursts: int = 6
    burst_size: int = 32
    """Requests with the same prompt."""
    every_ms: float = 10_000.0
    """Time between the starts of two bursts; 0: a closed loop, whose slots take the requests in order."""
    within_ms: float = 20.0
    """The requests of a burst fall into this time, drawn alike."""
    prompt_tokens: Length = 2048
    """Length of a burst's prompt, another text for every burst."""
    output_tokens: Length = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("bursts", self.bursts, 1, SESSIONS_MAX)
        at_least("burst_size", self.burst_size, 1, SESSIONS_MAX)
        sessions("bursts x burst_size", self.session_count)
        milliseconds("every_ms", self.every_ms)
        milliseconds("within_ms", self.within_ms)
        if self.every_ms and self.within_ms > self.every_ms:
            raise ValueError(
                f"within_ms = {self.within_ms:g} is longer than every_ms = {self.every_ms:g}: bursts would "
                "overlap; shorten within_ms, or give every_ms = 0 for a closed loop"
            )
        check_length("prompt_tokens", self.prompt_tokens, 1)
        check_length("output_tokens", self.output_tokens, 1)

    @property
    def session_count(self) -> int:
        return self.bursts * self.burst_size

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids, arrivals = (streams[f"workloads.{name}"] for name in ("spans", "session_ids", "arrivals"))
        length = length_sampler(self.prompt_tokens, streams["workloads.prompt_tokens"], 1)
        output = length_sampler(self.output_tokens, streams["workloads.output_tokens"], 1)
        for burst in range(self.bursts):
            prompt = ((spans.getrandbits(SPAN_ID_BITS), length()),)
            opens_us = round(burst * self.every_ms * 1000)
            offsets_us = sorted(int(arrivals.random() * self.within_ms * 1000) for _ in range(self.burst_size))
            for number, offset_us in enumerate(offsets_us):
                yield Session(
                    session_id=f"burst{burst:03d}-{number:03d}-{ids.getrandbits(32):08x}",
                    turns=(Turn(0, prompt, (spans.getrandbits(SPAN_ID_BITS), output())),),
                    group=f"burst-{burst}",
                    start_us=opens_us + offset_us if self.every_ms else None,
                )
