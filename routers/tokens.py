"""Token ids of a prompt, as a router can have them: sent by the client, or asked of a replica's `/tokenize`.

Only the engine's own tokenizer and chat template give the ids that its blocks are hashed from, so nothing is guessed
here. No answer means no tokens for this request: it is routed without, and counted by reason.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from routers.body import GenerationBody, given, prompt_ids, prompt_text
from routers.errors import EventError
from routers.faults import NO_FAULTS, RouterFaults
from routers.prompts import Prompt, TextPrompt, TokenPrompt

ASK_TIMEOUT_S = 2.0

_COMMON_FIELDS: tuple[str, ...] = ("model", "add_special_tokens")
_CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TokenStats(msgspec.Struct):
    from_body: int = 0
    asked: int = 0
    unreadable: int = 0  # no prompt that one sequence of tokens stands for
    failed: int = 0  # the replica gave no tokens
    ask_us: int = 0  # time spent asking, in all


class _Tokens(msgspec.Struct):
    tokens: list[int]


_REPLY = msgspec.json.Decoder(_Tokens)


class TokenSource:
    """`block_size`: the ids are hashed here, where a value that is no token id shows."""

    def __init__(self, session: aiohttp.ClientSession, block_size: int, faults: RouterFaults = NO_FAULTS) -> None:
        self.stats = TokenStats()
        self._faults = faults
        self._session = session
        self._block_size = block_size

    async def prompt(self, body: GenerationBody | None, ask_url: str | None, lora_names: set[str]) -> Prompt | None:
        """The prompt of a request, asked of the replica at `ask_url` if need be."""
        if body is None:
            self.stats.unreadable += 1
            return None
        lora = body.model if body.model in lora_names else None
        ids = prompt_ids(body)
        if ids is not None:
            self.stats.from_body += 1
            return self._checked(ids, None, lora, body.cache_salt)
        question = _question(body, as_text=self._faults.template_mismatch)
        if question is None:
            self.stats.unreadable += 1
            return None
        started = asyncio.get_running_loop().time()
        ids = await self._ask(ask_url, question) if ask_url is not None else None
        self.stats.ask_us += round(1e6 * (asyncio.get_running_loop().time() - started))
        if ids is None:
            self.stats.failed += 1
            return None
        self.stats.asked += 1
        return self._checked(ids, prompt_text(body), lora, body.cache_salt)

    def _checked(self, ids: list[int], text: str | None, lora: str | None, salt: str | None) -> Prompt | None:
        prompt = TokenPrompt(ids, text, lora, None if self._faults.ignore_extra_keys else salt)
        try:
            prompt.block_hashes(self._block_size)
        except EventError:
            self.stats.unreadable += 1
            return None
        return prompt

    async def _ask(self, url: str, question: dict[str, Any]) -> list[int] | None:
        try:
            async with self._session.post(
                f"{url}/tokenize",
                data=msgspec.json.encode(question),
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S),
            ) as reply:
                if reply.status != 200:
                    return None
                return _REPLY.decode(await reply.read()).tokens
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError, RecursionError):
            return None


def text_prompt(body: GenerationBody | None, join: str = "\n") -> Prompt | None:
    """For policies that read text alone, a chat's messages joined as theirs are."""
    text = prompt_text(body, join) if body is not None else None
    return TextPrompt(text) if text is not None else None


def _question(body: GenerationBody, *, as_text: bool = False) -> dict[str, Any] | None:
    """Body for `/tokenize`, with the request's own wishes about templates and special tokens. `as_text` is the fault of
    asking for the plain text of a chat."""
    if given(body.messages) and not as_text:
        question: dict[str, Any] = {"messages": body.messages}
        fields = (*_COMMON_FIELDS, *_CHAT_FIELDS)
    else:
        text = prompt_text(body)
        if text is None:
            return None
        question, fields = {"prompt": text}, _COMMON_FIELDS
    for name in fields:
        value = getattr(body, name)
        if value is not None and not (isinstance(value, msgspec.Raw) and not given(value)):
            question[name] = value
    return question
