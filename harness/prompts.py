"""A turn's prompt as both sides of the simulation know it: an engine's request and what a router sees of it.

One symbolic sequence serves both, so an engine and a router agree on block contents without either learning the
other's hashing. Tokens and text are only made for a policy that asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mock_engine import Request, RunSequence
from routers import with_extra_keys
from workloads import Session, Span, prompt_token_ids, span_text


class SpanPrompt:
    """One prompt; a router sees it through `tokens`, `block_hashes`, `token_ids` and `text`.

    `router_salt` is what the router makes of the sequence's salt; None if it overlooks it.
    """

    def __init__(
        self, spans: tuple[Span, ...], answer: Span, sequence: RunSequence, router_salt: str | None = None
    ) -> None:
        self.spans = spans
        self.answer = answer
        self.sequence = sequence
        self.router_salt = router_salt
        self._hashes: dict[int, npt.NDArray[np.uint64]] = {}

    @property
    def tokens(self) -> int:
        return self.sequence.prompt_tokens

    def block_hashes(self, block_size: int) -> npt.NDArray[np.uint64]:
        """Content of each full block; another block size than the engine's is counted anew."""
        hashes = self._hashes.get(block_size)
        if hashes is None:
            sequence = self.sequence
            if block_size != sequence.block_size:
                sequence = RunSequence(self.spans, self.answer[0], block_size=block_size)
            hashes = self._hashes[block_size] = np.array(sequence.block_contents(), dtype=np.uint64)
            if self.router_salt is not None and len(hashes):
                hashes[0] = with_extra_keys(int(hashes[0]), (self.router_salt,))
        return hashes

    @cached_property
    def _token_ids(self) -> list[int]:
        ids: list[int] = prompt_token_ids(self.spans).tolist()
        return ids

    def token_ids(self) -> Sequence[int]:
        return self._token_ids

    def text(self) -> str:
        return "".join(span_text(span_id, 0, tokens) for span_id, tokens in self.spans)

    def engine_request(self, request_id: str) -> Request:
        return Request(request_id=request_id, sequence=self.sequence, max_tokens=self.answer[1])


class PromptBook:
    """Makes prompts; a session's next prompt takes over what was already hashed for the one before.

    `overlook_salts`: the router takes tokens for all that tells blocks apart.
    """

    def __init__(self, block_size: int, *, overlook_salts: bool = False) -> None:
        self._block_size = block_size
        self._overlook_salts = overlook_salts
        self._last: dict[str, RunSequence] = {}

    def prompt(self, session: Session, turn: int) -> SpanPrompt:
        spans = session.prompt(turn)
        answer = session.turns[turn].output
        memo = self._last.get(session.session_id)
        salt = session.cache_salt
        sequence = RunSequence(spans, answer[0], memo, block_size=self._block_size, cache_salt=salt)
        self._last[session.session_id] = sequence
        return SpanPrompt(spans, answer, sequence, None if self._overlook_salts else salt)

    def forget(self, session: Session) -> None:
        """The session has ended; nothing of it is asked again."""
        self._last.pop(session.session_id, None)
