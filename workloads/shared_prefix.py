"""Workloads of single requests: `shared-prefix`, where groups of them begin alike, and `uniform-unique`, where
nothing can be reused and every cached token is therefore a fault of the measurement.

A request is a session of one turn. The order is drawn, so requests of a group come as strangers among others do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import ClassVar

from workloads.distributions import Length, check_sessions
from workloads.limits import ANY, SESSIONS_MAX, SOME, Whole, at_least, share
from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS, Span
from workloads.streams import Streams
from workloads.table import WorkloadTable


class SharedPrefix(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys as inference-perf's `shared_prefix` names them; those of vLLM's `prefix_repetition` are taken too."""

    kind: ClassVar[str] = "shared-prefix"
    aliases: ClassVar[Mapping[str, str]] = {
        "num_prefixes": "num_groups",
        "prefix_len": "system_prompt_len",
        "suffix_len": "question_len",
    }

    num_groups: int = 10
    """Prefixes there are; 10 as vLLM's num-prefixes."""
    num_prompts_per_group: Length = 32
    """Requests of a group, drawn once a group."""
    system_prompt_len: Length = 2048
    """Length of a group's prefix, drawn once a group."""
    question_len: Length = 256
    """What a request adds; 256 as vLLM's suffix-len."""
    output_len: Length = 128
    """Length of an answer; 128 as vLLM's output-len."""
    shared_fraction: float = 1.0
    """Share of requests that begin with their group's prefix; the others have one of their own, just as long."""

    def __post_init__(self) -> None:
        at_least("num_groups", self.num_groups, 1, SESSIONS_MAX)
        check_sessions("num_groups", self.num_groups, "num_prompts_per_group", self.num_prompts_per_group)
        share("shared_fraction", self.shared_fraction)
        super().__post_init__()

    def lengths(self) -> Mapping[str, Whole]:
        return {
            "num_prompts_per_group": Whole(1, SESSIONS_MAX // self.num_groups),
            "system_prompt_len": SOME,
            "question_len": ANY,
            "output_len": SOME,
        }

    def session_count(self, streams: Streams) -> int:
        return self.total("num_prompts_per_group", self.num_groups, streams)

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids = streams["workloads.spans"], streams["workloads.session_ids"]
        shared, order = streams["workloads.shared"], streams["workloads.order"]
        question, output, length, size = (
            self.sampler(name, streams)
            for name in ("question_len", "output_len", "system_prompt_len", "num_prompts_per_group")
        )
        drawn = streams["workloads.system_prompts"]
        prefixes: list[Span] = [(drawn.getrandbits(SPAN_ID_BITS), length()) for _ in range(self.num_groups)]
        sizes = [size() for _ in range(self.num_groups)]
        groups = array("q", (group for k in range(max(sizes)) for group, n in enumerate(sizes) if k < n))
        for number in range(len(groups)):
            place = number + int(order.random() * (len(groups) - number))
            group, groups[place] = groups[place], groups[number]
            member = shared.random() < self.shared_fraction
            first = prefixes[group] if member else (spans.getrandbits(SPAN_ID_BITS), prefixes[group][1])
            tokens = question()
            new = (first, (spans.getrandbits(SPAN_ID_BITS), tokens)) if tokens else (first,)
            yield Session(
                session_id=f"p{number:06d}-{ids.getrandbits(32):08x}",
                turns=(Turn(0, new, (spans.getrandbits(SPAN_ID_BITS), output())),),
                group=f"prefix-{group}" if member else None,
            )


class UniformUnique(WorkloadTable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No request has anything in common with another."""

    kind: ClassVar[str] = "uniform-unique"
    aliases: ClassVar[Mapping[str, str]] = {
        "input_len": "input_tokens",
        "num_prompts": "requests",
        "output_len": "output_tokens",
        "random_input_len": "input_tokens",
        "random_output_len": "output_tokens",
    }

    requests: int = 256
    input_tokens: Length = 1024
    """1,024 in and 128 out as vLLM's random data set."""
    output_tokens: Length = 128

    def __post_init__(self) -> None:
        at_least("requests", self.requests, 1, SESSIONS_MAX)
        super().__post_init__()

    def lengths(self) -> Mapping[str, Whole]:
        return {"input_tokens": SOME, "output_tokens": SOME}

    def session_count(self, streams: Streams) -> int:
        return self.requests

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids = streams["workloads.spans"], streams["workloads.session_ids"]
        length, output = (self.sampler(name, streams) for name in ("input_tokens", "output_tokens"))
        for number in range(self.requests):
            new = ((spans.getrandbits(SPAN_ID_BITS), length()),)
            yield Session(
                session_id=f"u{number:06d}-{ids.getrandbits(32):08x}",
                turns=(Turn(0, new, (spans.getrandbits(SPAN_ID_BITS), output())),),
            )
