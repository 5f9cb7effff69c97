"""Tokens become chunks: which leave, when, and with what. No socket, no clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_engine import BlockHasher, Request, TokenSequence
from mock_engine.bodies import ChatBodies, CompletionBodies
from mock_engine.logprobs import Logprobs
from mock_engine.reply import Prompt, Reply
from mock_engine.sampling import Sampling
from mock_engine.stops import StopScanner
from mock_engine.streams import UNSENT_BYTES_MAX, Choice
from mock_engine.tokenizer import WordTokenizer

WORDS = WordTokenizer()
HASHER = BlockHasher()


class Stream:
    """A reply with its choices, and what its client has read."""

    def __init__(self, kind: Any = CompletionBodies, *, stream: bool = True, n: int = 1, seed: int = 3, **options: Any):
        sampling_fields = {
            key: options.pop(key) for key in ("stop", "stop_token_ids", "include_stop", "min_tokens") if key in options
        }
        self.prompt = Prompt(WORDS.encode("hi"), "hi", n)
        self.reply = Reply(kind("cmpl-1", 7, "m", "fp"), [self.prompt], stream=stream, **options)
        self.sent = b""
        self.unsent = 0
        how = Sampling(max_tokens=99, **sampling_fields)
        self.choices = []
        for at in range(n):
            sequence = TokenSequence(self.prompt.ids, hasher=HASHER, output=seed + at)
            request = Request(request_id=str(at), sequence=sequence, max_tokens=99)
            self.choices.append(Choice(self.reply, self.prompt, request, sequence, how, WORDS))
        if stream:
            self.reply.open_stream(self._write, lambda: self.unsent)

    def _write(self, data: bytes) -> None:
        self.sent += data

    def tokens(self, count: int, final: str | None = None, choice: int = 0) -> bool:
        ended = False
        for at in range(count):
            ended = self.choices[choice].token(final if at == count - 1 else None)
        return ended

    @property
    def events(self) -> list[Any]:
        found = [line.removeprefix("data: ") for line in self.sent.decode().split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in found]

    def texts(self) -> list[str]:
        return [choice["text"] for event in self.events[:-1] for choice in event["choices"]]

    def answer(self, count: int, seed: int = 3) -> str:
        return WORDS.decode(TokenSequence([1], hasher=HASHER, output=seed).output_token_ids(0, count))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 30), st.integers(1, 5))
def test_chunks_join_to_the_whole_answer_whatever_the_interval(count: int, interval: int) -> None:
    stream = Stream(stream_interval=interval)
    stream.tokens(count, final="length")
    assert "".join(stream.texts()) == stream.answer(count)


def test_the_first_and_the_last_chunk_leave_at_once_and_others_by_interval() -> None:
    stream = Stream(stream_interval=3, return_token_ids=True)
    stream.tokens(9, final="length")
    sizes = [len(event["choices"][0]["token_ids"]) for event in stream.events[:-1]]
    assert sizes == [1, 3, 3, 2]


def test_plain_chunks_are_the_same_bytes_as_careful_ones() -> None:
    fast, careful = Stream(), Stream(logprobs=None)
    careful.choices[0]._plain = False
    fast.tokens(6, final="length")
    for at in range(6):
        careful.choices[0].token("length" if at == 5 else None)
        careful.choices[0]._plain = False
    assert fast.sent == careful.sent


def test_a_client_that_reads_slowly_gets_merged_chunks_and_loses_nothing() -> None:
    stream = Stream()
    stream.tokens(3)
    stream.unsent = UNSENT_BYTES_MAX + 1
    stream.tokens(50)
    assert len(stream.events) == 3
    stream.unsent = 0
    stream.tokens(1)
    stream.tokens(1, final="length")
    assert len(stream.texts()) == 5
    assert "".join(stream.texts()) == stream.answer(55)


@pytest.mark.parametrize("told", [False, True])
def test_of_a_client_that_reads_nothing_only_what_it_is_still_to_be_told_is_held(told: bool) -> None:
    stream = Stream(return_token_ids=told)
    stream.tokens(1)
    stream.unsent = UNSENT_BYTES_MAX + 1
    before = len(stream.sent)
    stream.tokens(2000)
    choice = stream.choices[0]
    assert len(stream.sent) == before
    assert len(choice._new_ids) == (2000 if told else 0)
    assert len(choice._text) < len(stream.answer(2001))


def test_what_is_written_before_the_stream_is_open_is_not_lost() -> None:
    reply = Reply(CompletionBodies("cmpl-1", 7, "m", "fp"), [], stream=True)
    early: list[bytes] = []
    assert reply.write is not None
    reply.write(b"one")
    reply.open_stream(early.append, int)
    reply.write(b"two")
    assert early == [b"one", b"two"]


def test_the_usage_chunk_follows_the_last_token_and_takes_the_fingerprint() -> None:
    stream = Stream(include_usage=True, show_details=True)
    stream.prompt.cached_tokens = 0
    stream.tokens(2, final="length")
    *_, last, used, done = stream.events
    assert "system_fingerprint" not in last
    assert used["choices"] == []
    assert used["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert used["system_fingerprint"] == "fp"
    assert done == "[DONE]"


def test_every_choice_carries_the_fingerprint_on_its_last_chunk_and_done_comes_once() -> None:
    stream = Stream(n=2)
    for at in (0, 1):
        stream.choices[at].token(None)
    for at in (0, 1):
        stream.choices[at].token("length")
    assert [event["choices"][0]["index"] for event in stream.events[:-1]] == [0, 1, 0, 1]
    assert ["system_fingerprint" in event for event in stream.events[:-1]] == [False, False, True, True]
    assert stream.events.count("[DONE]") == 1


def test_a_chat_stream_tells_its_role_together_with_the_first_token() -> None:
    stream = Stream(ChatBodies, continuous_usage=True, include_usage=True)
    assert not stream.sent
    stream.tokens(1)
    role, first = stream.events
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["usage"]["completion_tokens"] == 0
    assert first["usage"]["completion_tokens"] == 1


def test_a_stop_string_ends_the_answer_before_it_and_tells_the_engine() -> None:
    text = Stream().answer(8)
    stop = text[10:17]
    stream = Stream(stop=(stop,))
    ended = False
    for _ in range(8):
        ended = stream.choices[0].token(None)
        if ended:
            break
    assert ended
    assert "".join(stream.texts()) == text[: text.index(stop)]
    last = stream.events[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_a_held_back_prefix_of_a_stop_string_makes_an_empty_chunk() -> None:
    text = Stream().answer(2)
    stream = Stream(stop=(text[7:] + "never",))
    stream.tokens(3, final="length")
    assert "" in stream.texts()
    assert "".join(stream.texts()) == stream.answer(3)


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "abSTOP")])
def test_a_stop_string_is_shown_only_if_asked_for(include: bool, shown: str) -> None:
    scanner = StopScanner(Sampling(max_tokens=9, stop=("STOP",), include_stop=include))
    assert scanner.push("abST", 1) is None
    assert scanner.push("OPcd", 2) == "STOP"
    assert scanner.text == shown


def test_stop_strings_before_min_tokens_do_not_count() -> None:
    scanner = StopScanner(Sampling(max_tokens=9, stop=("x",), min_tokens=2))
    assert scanner.push("x", 1) is None
    assert scanner.push("x", 2) is None
    assert scanner.push("ax", 3) == "x"
    assert scanner.text == "xxa"


def test_a_stop_token_is_counted_but_not_shown_and_names_itself() -> None:
    token_id = TokenSequence([1], hasher=HASHER, output=3).output_token_ids(2, 3)[0]
    stream = Stream(stop_token_ids=(token_id,))
    stream.tokens(3, final="stop")
    last = stream.events[-2]["choices"][0]
    assert (last["text"], last["stop_reason"]) == ("", token_id)
    assert stream.choices[0].count == 3


def test_the_end_of_text_token_has_no_stop_reason() -> None:
    stream = Stream()
    stream.choices[0].eos_token_id = TokenSequence([1], hasher=HASHER, output=3).output_token_ids(0, 1)[0]
    stream.tokens(1, final="stop")
    assert stream.events[0]["choices"][0]["stop_reason"] is None


def test_an_aborted_stream_ends_with_an_empty_abort_chunk() -> None:
    stream = Stream()
    stream.tokens(2)
    stream.choices[0].abort()
    last = stream.events[-2]["choices"][0]
    assert (last["text"], last["finish_reason"]) == ("", "abort")
    assert stream.events[-1] == "[DONE]"


def test_errors_in_a_stream_are_spaced_for_completions_and_compact_for_chat() -> None:
    body = {"error": {"message": "m", "code": 400}}
    for kind, text in ((CompletionBodies, b'{"error": {"message": "m"'), (ChatBodies, b'{"error":{"message":"m"')):
        stream = Stream(kind)
        stream.reply.fail(body)
        assert stream.sent.startswith(b"data: " + text)
        assert stream.sent.endswith(b"data: [DONE]\n\n")


def test_a_client_that_left_is_written_to_no_more() -> None:
    stream = Stream()
    stream.tokens(1)
    before = stream.sent
    stream.reply.detach()
    stream.tokens(1, final="length")
    assert stream.sent == before


def test_a_whole_answer_has_the_text_and_ids_of_all_tokens() -> None:
    stream = Stream(stream=False, return_token_ids=True, echo=True)
    stream.tokens(4, final="length")
    body = json.loads(stream.reply.body())
    choice = body["choices"][0]
    assert choice["text"] == stream.answer(4)  # with the ids returned, the echo of the prompt is its ids
    assert choice["prompt_token_ids"] == stream.prompt.ids
    assert len(choice["token_ids"]) == 4
    assert body["usage"] == {
        "prompt_tokens": 2, "total_tokens": 6, "completion_tokens": 4, "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }  # fmt: skip


def test_newly_cached_tokens_of_a_chat_are_its_full_blocks_that_were_not_cached() -> None:
    stream = Stream(ChatBodies, stream=False, show_details=True, created_blocks_of=1)
    stream.prompt.cached_tokens = 1
    stream.tokens(1, final="length")
    details = json.loads(stream.reply.body())["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 1, "created_cache_tokens": 1, "multimodal_tokens": None}


def test_logprobs_have_one_row_a_token_and_the_asked_number_of_candidates() -> None:
    stream = Stream(logprobs=Logprobs("completion", 2))
    stream.tokens(3, final="length")
    for event, offset in zip(stream.events[:-1], (0, 7, 14), strict=True):
        told = event["choices"][0]["logprobs"]
        assert told["text_offset"] == [offset]
        assert len(told["top_logprobs"][0]) == 2
        assert told["token_logprobs"][0] < 0
