"""The JSON of `/inference/v1/generate`, the route of token ids in and token ids out, key by key as vLLM writes it.

Its answers have no `object` and no fingerprint, and usage comes before the choices. A stream's chunk keeps its nulls;
the ids of the prompt ride once, in the first chunk of all.
"""

from __future__ import annotations

import json
from typing import Any

from mock_engine.bodies import Bodies, Piece, encode_json, event, usage


class TokenBodies(Bodies):
    prefix = "generate-tokens-"

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        fingerprint: str,
        *,
        text: bool = False,
        show_prompt: bool = False,
    ) -> None:
        """`text` adds what the ids say; `show_prompt` sends the prompt's ids back."""
        super().__init__(response_id, created, model, fingerprint, "")
        self._created = created
        self._model = model
        self._text = text
        self._show_prompt = show_prompt
        self._prompt_told = False

    def first_events(self, piece: Piece, prompt_text: str | None, used: dict[str, Any] | None) -> bytes:
        return b""

    def _delta(self, piece: Piece) -> dict[str, Any]:
        told = {
            "index": piece.index,
            "finish_reason": piece.finish_reason,
            "token_ids": piece.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
        }
        if self._text:
            told["text"] = piece.text
        return {**told, "logprobs": piece.logprobs}

    choice = _delta

    def chunk(self, piece: Piece, used: dict[str, Any] | None = None, fingerprint: bool = False) -> bytes:
        chunk: dict[str, Any] = {"request_id": self.response_id, "usage": used}
        if self._show_prompt and not self._prompt_told:
            self._prompt_told = True
            chunk["prompt_token_ids"] = piece.prompt_ids
        return event({**chunk, "output_mode": self._mode, "choices": [self._delta(piece)]})

    def usage_chunk(self, used: dict[str, Any], metrics: dict[str, Any] | None = None) -> bytes:
        return event({"request_id": self.response_id, "usage": used, "output_mode": self._mode, "choices": []})

    @property
    def _mode(self) -> str:
        return "text" if self._text else "tokens"

    def running_usage(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return usage(prompt_tokens, completion_tokens)

    def error_event(self, body: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    def whole(self, choices: list[dict[str, Any]], used: dict[str, Any], **rest: Any) -> bytes:
        return encode_json(
            {
                "request_id": self.response_id,
                "model": self._model,
                "created": self._created,
                "usage": used,
                "prompt_logprobs": rest.get("prompt_logprobs"),
                "prompt_token_ids": rest.get("prompt_ids") if self._show_prompt else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "output_mode": self._mode,
                "choices": choices,
            }
        )
