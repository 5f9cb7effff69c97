"""Log-probabilities in the two shapes of the API. There is no model, so the numbers are made up: a function of the
token id alone, below zero and stable, so that a client that asks for them gets well-formed answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mock_engine.tokenizer import Tokenizer

_SPREAD = 0x9E3779B1  # odd, so that neighbouring ids get far-apart numbers
_RUNNER_UP = 1.0  # how much less likely each next candidate is


def logprob(token_id: int) -> float:
    return -1.0 - (token_id * _SPREAD % 4096) / 4096


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What a request asked for."""

    chat: bool
    top: int  # candidates per position, besides the sampled token
    as_ids: bool  # tokens are written token_id:N

    def of(self, token_ids: Sequence[int], tokenizer: Tokenizer, text_offset: int) -> dict[str, Any]:
        rows = [self._candidates(token_id, tokenizer) for token_id in token_ids]
        if self.chat:
            content = []
            for (name, value), *others in rows:
                top = [_entry(*candidate) for candidate in ((name, value), *others)[: self.top]]
                content.append({**_entry(name, value), "top_logprobs": top})
            return {"content": content}
        offsets = []
        for (name, _), *_rest in rows:
            offsets.append(text_offset)
            text_offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [row[0][1] for row in rows],
            "tokens": [row[0][0] for row in rows],
            "top_logprobs": [dict(row) for row in rows],
        }

    def _candidates(self, token_id: int, tokenizer: Tokenizer) -> list[tuple[str, float]]:
        ids = [token_id, *((token_id + step) % tokenizer.vocab_size for step in range(1, self.top))]
        names = [f"token_id:{one}" for one in ids] if self.as_ids else [tokenizer.decode([one]) for one in ids]
        return [(name, logprob(token_id) - _RUNNER_UP * at) for at, name in enumerate(names)]


def _entry(name: str, value: float) -> dict[str, Any]:
    return {"token": name, "logprob": value, "bytes": list(name.encode("utf-8", "replace"))}
