"""Log-probabilities in the shapes of the API. There is no model, so the numbers are made up: a function of the token id
alone, below zero and stable, so that a client that asks for them gets well-formed answers.

A token of a prompt or of an answer is always the likeliest at its place; the runners-up are the ids that follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mock_engine.tokenizer import Tokenizer

_SPREAD = 0x9E3779B1  # odd, so that neighbouring ids get far-apart numbers
_RUNNER_UP = 1.0  # how much less likely each next candidate is


def logprob(token_id: int) -> float:
    return -1.0 - (token_id * _SPREAD % 4096) / 4096


class Candidate(NamedTuple):
    token_id: int
    value: float
    rank: int


def candidates(token_id: int, count: int, vocab_size: int) -> list[Candidate]:
    """The token itself, and with it the `count` likeliest ones."""
    ids = [token_id, *((token_id + step) % vocab_size for step in range(1, count))]
    return [Candidate(one, logprob(token_id) - _RUNNER_UP * at, at + 1) for at, one in enumerate(ids)]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What a request asked for."""

    form: Literal["completion", "chat", "ids"]
    top: int  # candidates per position
    as_ids: bool = False  # tokens are written token_id:N

    def of(self, token_ids: Sequence[int], tokenizer: Tokenizer, text_offset: int, unknown: int = 0) -> dict[str, Any]:
        """Of these tokens, the first `unknown` of which nothing precedes, so that they have none."""
        rows = [candidates(token_id, self.top, tokenizer.vocab_size) for token_id in token_ids]
        if self.form == "ids":
            return {"content": [_id_entry(row) for row in rows]}
        names = [[self._name(one, tokenizer) for one in row] for row in rows]
        if self.form == "chat":
            pairs = [
                list(zip(name, (one.value for one in row), strict=True)) for name, row in zip(names, rows, strict=True)
            ]
            return {"content": [{**_entry(*pair[0]), "top_logprobs": _entries(pair[: self.top])} for pair in pairs]}
        offsets = []
        for name, *_ in names:
            offsets.append(text_offset)
            text_offset += len(name)
        values: list[float | None] = [row[0].value for row in rows]
        tops: list[dict[str, float] | None] = [
            {name: one.value for name, one in zip(found, row, strict=True)}
            for found, row in zip(names, rows, strict=True)
        ]
        nothing = [None] * unknown
        return {
            "text_offset": offsets,
            "token_logprobs": nothing + values[unknown:],
            "tokens": [name for name, *_ in names],
            "top_logprobs": nothing + tops[unknown:],
        }

    def _name(self, one: Candidate, tokenizer: Tokenizer) -> str:
        return f"token_id:{one.token_id}" if self.as_ids else tokenizer.decode([one.token_id])


def prompt_logprobs(token_ids: Sequence[int], top: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """One object a token, by token id; nothing for the first, which nothing precedes."""
    told: list[dict[str, Any] | None] = [None]
    for token_id in token_ids[1:]:
        found = candidates(token_id, top, tokenizer.vocab_size)
        told.append(
            {
                str(one.token_id): {
                    "logprob": one.value,
                    "rank": one.rank,
                    "decoded_token": tokenizer.decode([one.token_id]),
                }
                for one in found
            }
        )
    return told


def _entry(name: str, value: float) -> dict[str, Any]:
    return {"token": name, "logprob": value, "bytes": list(name.encode("utf-8", "replace"))}


def _entries(pairs: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    return [_entry(*pair) for pair in pairs]


def _id_entry(row: Sequence[Candidate]) -> dict[str, Any]:
    told = [{"token_id": one.token_id, "logprob": one.value, "rank": one.rank} for one in row]
    return {**told[0], "top_logprobs": told}
