"""One HTTP answer: what its choices have in common, and when it begins and ends.

Bytes leave through a function that is handed in, or are collected for one body; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mock_engine.bodies import DONE, Bodies, Piece, prompt_details, usage
from mock_engine.logprobs import Logprobs

if TYPE_CHECKING:
    from mock_engine.streams import Choice


class Prompt:
    """One prompt of a request and what its samples have in common."""

    __slots__ = ("cached_tokens", "ids", "longest", "n", "open", "text")

    def __init__(self, ids: list[int], text: str | None, n: int) -> None:
        self.ids = ids
        self.text = text
        self.n = n
        self.open = n  # samples that have not ended
        self.longest = 0
        self.cached_tokens: int | None = None


class Reply:
    """An HTTP answer. `write` takes whole events of a stream, held until the stream is open; without one the answer is
    collected for `body`."""

    def __init__(
        self,
        bodies: Bodies,
        prompts: Sequence[Prompt],
        *,
        stream: bool = False,
        echo: bool = False,
        return_token_ids: bool = False,
        include_usage: bool = False,
        continuous_usage: bool = False,
        show_details: bool = False,
        created_blocks_of: int | None = None,
        stream_interval: int = 1,
        prompt_text: str | None = None,
        echo_only: bool = False,
        logprobs: Logprobs | None = None,
        client_id: str = "",
        first_chunk_tokens: int = 1,
        reasoning_tokens: int = 0,
        hide_reasoning: bool = False,
        tell_metrics: bool = False,
    ) -> None:
        self.bodies = bodies
        self.client_id = client_id or bodies.response_id  # the id that the client sent, for logs
        self.error: dict[str, Any] | None = None  # what ended the answer instead of its last token
        self.prompts = prompts
        self.echo = echo
        self.echo_only = echo_only
        self.return_token_ids = return_token_ids
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage and include_usage
        self.show_details = show_details
        self.created_blocks_of = created_blocks_of  # block size if newly cached tokens are told too
        self.stream_interval = stream_interval
        self.first_chunk_tokens = first_chunk_tokens  # held back until there are so many
        self.reasoning_tokens = reasoning_tokens  # of each choice, before its content
        self.hide_reasoning = hide_reasoning and reasoning_tokens > 0  # with all that could give it away
        self.tell_metrics = tell_metrics
        self.prompt_text = prompt_text
        self.logprobs = None if self.hide_reasoning else logprobs
        self.tells_ids = return_token_ids or self.logprobs is not None  # so what is held back needs them, too
        self.choices: list[Choice] = []
        self.open = 0
        self._early: list[bytes] = []
        self.write: Callable[[bytes], None] | None = self._early.append if stream else None
        self.unsent: Callable[[], int] = int
        self.on_end: Callable[[], None] = _nothing
        self._begun = False

    def add(self, choice: Choice) -> None:
        self.choices.append(choice)
        self.open += 1

    def open_stream(self, write: Callable[[bytes], None], unsent: Callable[[], int]) -> None:
        """The headers are out: events go to `write` from now on, while `unsent` bytes wait for the client."""
        for data in self._early:
            write(data)
        self.write, self.unsent = write, unsent

    def begin(self) -> None:
        """What leaves ahead of the first chunk, for all choices at once."""
        if self._begun or self.write is None:
            return
        self._begun = True
        told = self.return_token_ids
        for choice in self.choices:
            ids = choice.prompt.ids
            used = self.bodies.running_usage(len(ids), 0) if self.continuous_usage else None
            first = self.bodies.first_events(
                Piece(choice.index, "", prompt_ids=ids if told else None), self.prompt_text, used
            )
            if first:
                self.write(first)

    def choice_ended(self) -> None:
        self.open -= 1
        if self.open:
            return
        if self.write is not None:
            if self.include_usage:
                self.write(self.bodies.usage_chunk(self._usage(streamed=True), self._metrics()))
            self.write(DONE)
        self.on_end()

    def fail(self, body: dict[str, Any]) -> None:
        """Ends the answer with an error; in a stream it comes as an event after the headers."""
        if self.error is not None:
            return
        self.open, self.error = 0, body
        if self.write is not None:
            self.write(self.bodies.error_event(body))
            self.write(DONE)
        self.on_end()

    def detach(self) -> None:
        """The client is gone: write nothing any more."""
        self.write = None
        self.on_end = _nothing

    def _usage(self, streamed: bool) -> dict[str, Any]:
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        details = None
        if self.show_details:
            told = self.prompts[0] if streamed else self.prompts[-1]
            cached = told.cached_tokens or 0
            created = None
            if self.created_blocks_of is not None:
                created = len(told.ids) // self.created_blocks_of * self.created_blocks_of - cached
            details = prompt_details(cached, created)
        return usage(prompt_tokens, sum(choice.count for choice in self.choices), details, streamed=streamed)

    def _metrics(self) -> dict[str, Any] | None:
        """Timings belong to one sample of one prompt; of several, none is told."""
        return self.choices[0].timings() if self.tell_metrics and len(self.choices) == 1 else None

    def body(self) -> bytes:
        """The whole answer, once every choice has ended."""
        chat_ids = self.prompts[0].ids if self.return_token_ids else None
        rows = [choice.row() for choice in self.choices]
        return self.bodies.whole(
            rows,
            self._usage(streamed=False),
            metrics=self._metrics(),
            prompt_ids=chat_ids,
            prompt_text=self.prompt_text,
            prompt_logprobs=self.choices[0].prompt_logprobs() if self.choices else None,
        )


def _nothing() -> None:
    return None
