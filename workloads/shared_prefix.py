"""Workloads of single requests: `shared-prefix`, where groups of them begin alike, and `uniform-unique`, where
nothing can be reused and every cached token is therefore a fault of the measurement.

A request is a session of one turn. The order is drawn, so requests of a group come as strangers among others do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import ClassVar

from workloads.distributions import Length, check_length, length_sampler
from workloads.limits import SESSIONS_MAX, at_least, sessions, share
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
    num_prompts_per_group: int = 32
    system_prompt_len: Length = 2048
    """Length of a group's prefix, drawn once a group."""
    question_len: Length = 256
    """What a request adds; 256 as vLLM's suffix-len."""
    output_len: Length = 128
    """Length of an answer; 128 as vLLM's output-len."""
    shared_fraction: float = 1.0
    """Share of requests that begin with their group's prefix; the others have one of their own, just as long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("num_groups", self.num_groups, 1, SESSIONS_MAX)
        at_least("num_prompts_per_group", self.num_prompts_per_group, 1, SESSIONS_MAX)
        sessions("num_groups x num_prompts_per_group", self.session_count)
        check_length("system_prompt_len", self.system_prompt_len, 1)
        check_length("question_len", self.question_len, 0)
        check_length("output_len", self.output_len, 1)
        share("shared_fraction", self.shared_fraction)

    @property
    def session_count(self) -> int:
        return self.num_groups * self.num_prompts_per_group

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids = streams["workloads.spans"], streams["workloads.session_ids"]
        shared, order = streams["workloads.shared"], streams["workloads.order"]
        question = length_sampler(self.question_len, streams["workloads.question_len"], 0)
        output = length_sampler(self.output_len, streams["workloads.output_len"], 1)
        length = length_sampler(self.system_prompt_len, streams["workloads.system_prompt_len"], 1)
        drawn = streams["workloads.system_prompts"]
        prefixes: list[Span] = [(drawn.getrandbits(SPAN_ID_BITS), length()) for _ in range(self.num_groups)]
        groups = array("l", range(self.num_groups)) * self.num_prompts_per_group
        for number in range(self.session_count):
            place = number + int(order.random() * (self.session_count - number))
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
        super().__post_init__()
        at_least("requests", self.requests, 1, SESSIONS_MAX)
        check_length("input_tokens", self.input_tokens, 1)
        check_length("output_tokens", self.output_tokens, 1)

    @property
    def session_count(self) -> int:
        return self.requests

    def draw(self, streams: Streams) -> Iterator[Session]:
        spans, ids = streams["workloads.spans"], streams["workloads.session_ids"]
        length = length_sampler(self.input_tokens, streams["workloads.input_tokens"], 1)
        output = length_sampler(self.output_tokens, streams["workloads.output_tokens"], 1)
        for number in range(self.requests):
            new = ((spans.getrandbits(SPAN_ID_BITS), length()),)
            yield Session(
                session_id=f"u{number:06d}-{ids.getrandbits(32):08x}",
                turns=(Turn(0, new, (spans.getrandbits(SPAN_ID_BITS), output())),),
            )
