"""Routes that turn text into tokens and back, and that show a request as the engine would get it.

They use the very code of the generation routes, so what they tell is what is hashed. Render, and the route that takes
what it renders, are closed without --enable-scale-out, and say so before they look at the body.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from aiohttp import web

from mock_engine.bodies import ChatBodies, CompletionBodies, encode_json
from mock_engine.errors import RequestError
from mock_engine.foreign_chat import from_anthropic, from_responses
from mock_engine.generation import Generation
from mock_engine.prompts import chat_text
from mock_engine.protocol import check, parse_chat, parse_completion, parse_either
from mock_engine.replica import Replica
from mock_engine.schemas import DETOKENIZE, TOKENIZE_CHAT, TOKENIZE_PROMPT

SCALE_OUT_CLOSED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
SCALE_OUT_ROUTES = (
    "/v1/completions/render", "/v1/chat/completions/render", "/v1/responses/render", "/v1/messages/render",
    "/inference/v1/generate",
)  # fmt: skip


class TextRoutes:
    def __init__(self, replica: Replica, generation: Generation) -> None:
        self._replica = replica
        self._generation = generation

    def add(self, app: web.Application) -> None:
        options = self._replica.options
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        if options.enable_tokenizer_info_endpoint:
            app.router.add_get("/tokenizer_info", self.tokenizer_info, allow_head=False)
        if not options.enable_scale_out:
            for route in SCALE_OUT_ROUTES:
                app.router.add_post(route, self.closed)
            return
        app.router.add_post("/v1/completions/render", self.render_completion)
        app.router.add_post("/v1/chat/completions/render", self.render_chat)
        app.router.add_post("/v1/messages/render", self.render_messages)
        app.router.add_post("/v1/responses/render", self.render_responses)
        app.router.add_post("/inference/v1/generate", self._generation.tokens)

    async def tokenize(self, request: web.Request) -> web.Response:
        model, fields = parse_either(TOKENIZE_PROMPT, TOKENIZE_CHAT, await self._generation.read(request))
        replica = self._replica
        replica.models.resolve(fields["model"])
        if model is TOKENIZE_CHAT:
            text = chat_text(fields, self._generation.template_for(fields))
        else:
            text = fields["prompt"]
        ids = replica.tokenizer.encode(text, fields["add_special_tokens"])
        return _json(
            {
                "count": len(ids),
                "max_model_len": replica.config.max_model_len,
                "tokens": ids,
                "token_strs": replica.tokenizer.token_strs(ids) if fields["return_token_strs"] else None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        fields = check(DETOKENIZE, await self._generation.read(request))
        self._replica.models.resolve(fields["model"])
        return _json({"prompt": self._replica.tokenizer.decode(fields["tokens"])})

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        tokenizer = self._replica.tokenizer
        return _json(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": tokenizer.vocab_size,
                "eos_token_id": tokenizer.eos_token_id,
                "chat_template": tokenizer.chat_template,
            }
        )

    async def closed(self, request: web.Request) -> web.Response:
        raise RequestError(403, SCALE_OUT_CLOSED, "PermissionDeniedError")

    async def render_completion(self, request: web.Request) -> web.Response:
        fields = parse_completion(await self._generation.read(request))
        shown = self._rendered(request, fields, CompletionBodies)
        return _json(shown)

    async def render_chat(self, request: web.Request) -> web.Response:
        return _json(self._rendered_chat(request, parse_chat(await self._generation.read(request))))

    async def render_messages(self, request: web.Request) -> web.Response:
        return _json(self._rendered_chat(request, from_anthropic(await self._generation.read(request))))

    async def render_responses(self, request: web.Request) -> web.Response:
        fields = from_responses(await self._generation.read(request))
        shown = self._rendered(request, fields, ChatBodies)[0]
        return _json({**shown, "request_id": fields["request_id"] or f"resp_{uuid4().hex[:16]}"})

    def _rendered_chat(self, request: web.Request, fields: dict[str, Any]) -> dict[str, Any]:
        shown = self._rendered(request, fields, ChatBodies)[0]
        shown["parse_context"] = {
            "tools": fields["tools"],
            "tool_choice": fields["tool_choice"],
            "parallel_tool_calls": fields["parallel_tool_calls"],
            "include_reasoning": fields["include_reasoning"],
            "chat_template_kwargs": {
                "cohere_format": "cmd4",
                **(fields["chat_template_kwargs"] or {}),
                "add_generation_prompt": fields["add_generation_prompt"],
                "continue_final_message": fields["continue_final_message"],
            },
            "history_tool_call_cnt": sum(len(message.get("tool_calls") or ()) for message in fields["messages"]),
        }
        return shown

    def _rendered(
        self, request: web.Request, fields: dict[str, Any], kind: type[CompletionBodies] | type[ChatBodies]
    ) -> list[dict[str, Any]]:
        _, _, prompts, chosen = self._generation.prepare(fields, kind)
        given = request.headers.get("X-Request-Id") or fields["request_id"] or uuid4().hex[:16]
        rows = []
        for at, (prompt, how) in enumerate(zip(prompts, chosen, strict=True)):
            offsets = None
            if fields["return_token_offsets"] and prompt.text is not None:
                offsets = self._replica.tokenizer.offsets(prompt.text, fields["add_special_tokens"])
            rows.append(
                {
                    "request_id": f"{kind.prefix}{given}{f'-{at}' if len(prompts) > 1 else ''}",
                    "token_ids": prompt.ids,
                    "token_offsets": offsets,
                    "features": None,
                    "content_parts": None,
                    "sampling_params": how.rendered,
                    "model": fields["model"],
                    "reasoning_ended": None,
                    "reasoning_parser_kwargs": None,
                    "return_token_ids": fields["return_token_ids"],
                    "output_mode": "tokens",
                    "parse_context": None,
                    "stream": bool(fields["stream"]),
                    "stream_options": fields["stream_options"],
                    "cache_salt": fields["cache_salt"],
                    "priority": fields["priority"],
                    "kv_transfer_params": fields["kv_transfer_params"],
                    "ec_transfer_params": fields["ec_transfer_params"],
                }
            )
        return rows


def _json(value: Any) -> web.Response:
    return web.Response(body=encode_json(value), content_type="application/json")
