"""The names that requests may use: served names first, then LoRA adapters, as /v1/models lists them.

Whichever alias a request asks for, answers carry the first served name; an adapter answers under its own.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from mock_engine.errors import RequestError
from mock_engine.hashing import Lora
from mock_engine.protocol import clean


class Models:
    def __init__(
        self, root: str, names: tuple[str, ...], max_model_len: int, adapters: tuple[tuple[str, str], ...]
    ) -> None:
        self.root = root
        self.names = names or (root,)
        self._max_model_len = max_model_len
        self._adapters: dict[str, Lora] = {}
        self._next_lora_id = 1
        for name, path in adapters:
            self.load(name, path)

    @property
    def first(self) -> str:
        return self.names[0]

    @property
    def adapters(self) -> dict[str, Lora]:
        return dict(self._adapters)

    def resolve(self, asked: str | None) -> tuple[str, Lora | None]:
        """The name for the answer and the adapter, if one was asked for."""
        if not asked or asked in self.names:
            return self.first, None
        adapter = self._adapters.get(asked)
        if adapter is None:
            aliases = ", ".join([*self.names, *self._adapters])
            message = f"The model `{asked}` does not exist. Valid aliases: {aliases}."
            raise RequestError(404, message, "NotFoundError", "model")
        return asked, adapter

    def load(self, name: str, path: str) -> None:
        if not name or not path or clean(name) != name or clean(path) != path:
            raise RequestError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name in self._adapters or name in self.names:
            message = f"The lora adapter '{name}' has already been loaded."
            raise RequestError(400, message, "InvalidUserInput")
        self._adapters[name] = Lora(name, path, self._next_lora_id)
        self._next_lora_id += 1

    def unload(self, name: str) -> None:
        if name not in self._adapters:
            raise RequestError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self._adapters[name]

    def cards(self) -> dict[str, Any]:
        cards = [_card(name, self.root, None, self._max_model_len) for name in self.names]
        cards += [_card(lora.name, lora.path, self.first, None) for lora in self._adapters.values()]
        return {"object": "list", "data": cards}


def _card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    now = int(time.time())
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": now,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
