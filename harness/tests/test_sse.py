import gzip
import time
from urllib.parse import urlsplit

import gevent
import pytest
from geventhttpclient import HTTPClient
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.sse import BrokenStreamError, Event, EventParser, TokenMeter, error_text, is_engine_error, read_stream
from harness.tests.sse_server import DONE, END, HEAD, chat, completion, event, http_chunk, serve, usage

MS = 1_000_000


def parse(*chunks):
    parser = EventParser()
    return [found for chunk in chunks for found in parser.feed(chunk)] + parser.close()


def metered(*events, **options):
    """A meter that got each (ms, chunk or bytes)."""
    meter = TokenMeter(**options)
    for ms, value in events:
        data = value if isinstance(value, bytes) else event(value)[6:-2]
        meter.event(Event(data), ms * MS)
    return meter


# ---- bytes to events -----------------------------------------------------------------------------------------------


@given(st.data())
@settings(deadline=None, max_examples=80)
def test_events_do_not_depend_on_where_the_bytes_were_cut(data):
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    payloads = data.draw(
        st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), max_size=5)
    )
    stream = ""
    for payload in payloads:
        if data.draw(st.booleans()):
            stream += f": keep-alive{end}{end}"
        stream += f"data: {payload}{end}{end}"
    raw = stream.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert [e.data.decode() for e in parse(*chunks)] == payloads


def test_an_event_is_there_as_soon_as_its_last_byte_is():
    parser = EventParser()
    assert parser.feed(b": hello\n\n") == []
    assert parser.feed(b"data: a\n\n") == [Event(b"a")]
    assert parser.feed(b"data: b") == []
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\ndata: c\n\ndata: d\n\n") == [Event(b"b"), Event(b"c"), Event(b"d")]
    assert parser.feed(b"data: e\r\n\r") == [Event(b"e")]
    assert parser.feed(b"\ndata: f\n\n") == [Event(b"f")]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\ndata: b\n\n", [Event(b"a\nb")]),
        (b"data:a\n\n", [Event(b"a")]),
        (b"data:  a\n\n", [Event(b" a")]),
        (b"data\n\n", [Event(b"")]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [Event(b"a", "error"), Event(b"b")]),
        (b"event: error\n\ndata: b\n\n", [Event(b"b")]),
        (b"id: 3\nretry: 5\ndata: a\n\n", [Event(b"a")]),
        (b": ping\n\n: ping\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", [Event(b"a")]),
        (b"data: a\n\ndata: lost\n", [Event(b"a")]),
        (b"data: a\n\ndata: [DONE]", [Event(b"a"), Event(b"[DONE]")]),
        (b"", []),
    ],
)
def test_lines_become_events_as_the_standard_says(stream, events):
    assert parse(stream) == events
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == events


# ---- events to tokens ----------------------------------------------------------------------------------------------

VECTOR = [
    (150, chat({"role": "assistant", "content": ""})),
    (200, chat({"content": " one"})),
    (250, chat({"content": " two"})),
    (330, chat({"content": " three four"})),
    (400, chat({"content": " five"}, finish_reason="stop")),
    (450, usage(9, 5)),
    (500, b"[DONE]"),
]


def assert_vector(meter, sent_ms=0, within_ms=0.0):
    def ms(instant_ns):
        return instant_ns / MS - sent_ms

    assert ms(meter.first_ns) == pytest.approx(200, abs=within_ms)
    assert ms(meter.second_ns) == pytest.approx(250, abs=within_ms)
    assert ms(meter.last_ns) == pytest.approx(400, abs=within_ms)
    assert [gap / MS for gap in meter.gaps_ns] == pytest.approx([50, 80, 70], abs=within_ms)
    assert (meter.output_tokens, meter.token_source, meter.cached_tokens) == (5, "usage", None)
    assert meter.verdict() == ("ok", None, None)
    # TPOT 50, ntpot 80, E2E 400 follow: (400 - 200) / 4, 400 / 5, 400.


def test_the_test_vector_of_the_field_is_read_exactly():
    assert_vector(metered(*VECTOR))


def test_the_test_vector_is_read_over_a_slow_socket():
    """Instants over real sockets are loose: this machine may be busy with other tests."""

    def script(request):
        at = 0
        yield HEAD
        for ms, value in VECTOR:
            yield ms - at
            at = ms
            yield http_chunk(event(value) if isinstance(value, dict) else DONE)
        yield END

    meter = TokenMeter()
    sent_ns, end_ns = read_over_http(script, meter)
    assert_vector(meter, sent_ns / MS, within_ms=25)
    assert (end_ns - sent_ns) / MS == pytest.approx(500, abs=25)


def test_a_role_chunk_is_no_token_and_empty_text_is_one():
    meter = metered(
        (10, chat({"role": "assistant", "content": ""})),
        (20, chat({"content": ""})),
        (30, chat({"content": " a"}, finish_reason="stop")),
    )
    assert (meter.first_ns, meter.chunks) == (20 * MS, 2)
    assert metered((10, chat({"role": "assistant", "content": None}))).chunks == 0
    assert metered((10, chat({"role": "assistant", "content": "hello"}))).chunks == 1
    assert metered((10, completion("")), (20, completion(" a"))).first_ns == 10 * MS


def test_reasoning_and_tool_calls_are_tokens():
    meter = metered(
        (10, chat({"role": "assistant", "content": ""})),
        (20, chat({"reasoning": "hm"})),
        (30, chat({"reasoning_content": "hm"})),
        (40, chat({"tool_calls": [{"index": 0}]})),
        (50, chat({"content": "yes"})),
    )
    assert (meter.first_ns, meter.content_ns, meter.chunks) == (20 * MS, 40 * MS, 4)


def test_a_last_chunk_without_content_is_no_token():
    meter = metered((10, chat({"content": " a"})), (20, chat({}, finish_reason="stop")))
    assert (meter.chunks, meter.last_ns, meter.finish_reason) == (1, 10 * MS, "stop")


def test_tokens_in_one_chunk_are_counted_by_usage_and_not_by_chunks():
    chunks = [(40 * k, completion(" a b c d")) for k in range(32)]
    meter = metered(*chunks, (1280, usage(8, 128)))
    assert (meter.output_tokens, meter.chunks, meter.token_source) == (128, 32, "usage")
    assert metered(*chunks).token_source == "chunks"


def test_the_tokens_of_the_first_chunk_are_known_by_ids_by_running_usage_or_by_equal_counts():
    by_ids = metered((10, completion(" a b", token_ids=[7, 8])), (20, completion(" c", token_ids=[9])))
    by_usage = metered((10, completion(" a b") | {"usage": usage(7, 2)["usage"]}), (20, usage(7, 3)))
    one_each = metered((10, completion(" a")), (20, completion(" b")), (20, usage(7, 2)))
    assert [meter.first_chunk_tokens for meter in (by_ids, by_usage, one_each)] == [2, 2, 1]
    assert metered((10, completion(" a b")), (20, completion(" c")), (20, usage(7, 3))).first_chunk_tokens is None


def test_the_last_usage_wins_and_unknown_cached_tokens_are_not_zero():
    running = [completion(" a") | {"usage": usage(7, n)["usage"]} for n in (1, 2)]
    meter = metered((10, running[0]), (20, running[1]), (30, usage(7, 2, cached=4)), (30, b"[DONE]"))
    assert (meter.output_tokens, meter.prompt_tokens, meter.cached_tokens) == (2, 7, 4)
    assert meter.chunks == 2
    assert metered((10, usage(7, 2, cached=0))).cached_tokens == 0
    assert metered((10, usage(7, 2))).cached_tokens is None


def test_running_usage_tells_which_chunk_brought_no_token():
    meter = metered(
        (10, completion("") | {"usage": usage(7, 0)["usage"]}),
        (20, completion(" a") | {"usage": usage(7, 1)["usage"]}),
        (30, completion("") | {"usage": usage(7, 1)["usage"]}),
    )
    assert (meter.first_ns, meter.last_ns, meter.chunks) == (20 * MS, 20 * MS, 1)


def test_an_empty_list_of_ids_is_no_token():
    meter = metered(
        (10, completion("", token_ids=[])),
        (20, completion(" a", token_ids=[7, 8])),
        (30, completion(" b", token_ids=[9])),
        keep_ids=True,
    )
    assert (meter.first_ns, meter.token_ids, meter.output_tokens) == (20 * MS, [7, 8, 9], 3)
    assert meter.token_source == "token_ids"


def test_text_is_kept_only_when_asked_for():
    chunks = [(1, chat({"content": "a"})), (2, chat({"content": "b"}))]
    assert metered(*chunks, keep_text=True).text == "ab"
    assert metered(*chunks).text == ""


@pytest.mark.parametrize(
    ("events", "status", "error_class"),
    [
        ([completion(" a", finish_reason="length")], "ok", None),
        ([completion(" a"), b"[DONE]"], "ok", None),
        ([completion(" a")], "incomplete", "truncated"),
        ([b"[DONE]"], "incomplete", "truncated"),
        ([], "incomplete", "truncated"),
        ([completion(" a"), {"error": {"message": "gone", "code": 500}}, b"[DONE]"], "incomplete", "engine"),
        ([completion(" a"), completion("", finish_reason="abort"), b"[DONE]"], "incomplete", "engine"),
        ([completion(" a"), b"{nonsense", b"[DONE]"], "incomplete", "protocol"),
        ([completion(" a"), b'{"choices": 3}'], "incomplete", "protocol"),
    ],
)
def test_success_takes_an_end_a_token_and_no_error(events, status, error_class):
    assert metered(*((10, e) for e in events)).verdict()[:2] == (status, error_class)


def test_an_event_named_error_is_an_error():
    meter = metered((10, completion(" a")))
    meter.event(Event(b'{"message": "gone"}', "error"), 20)
    assert meter.verdict() == ("incomplete", "engine", "error inside the answer: gone")


def test_the_abort_chunk_is_no_token():
    assert metered((10, completion(" a")), (90, completion("", finish_reason="abort"))).last_ns == 10 * MS


def test_an_error_body_says_whose_it_is():
    ours = b'{"error": {"message": "no", "type": "BadRequestError", "param": null, "code": 400}}'
    assert is_engine_error(ours)
    assert error_text(ours) == "no"
    for foreign in (b"Bad Gateway", b"<html></html>", b'{"detail": "no"}', b'{"error": "no"}', b"[]", b""):
        assert not is_engine_error(foreign)
        assert error_text(foreign)


# ---- over sockets --------------------------------------------------------------------------------------------------


def read_over_http(script, meter, headers=None):
    """(instant of sending, instant of the end) of one exchange; both clocks are this process's."""
    with serve(script) as server:
        split = urlsplit(server.url)
        client = HTTPClient(split.hostname, split.port, network_timeout=10)
        sent_ns = time.monotonic_ns()
        with gevent.Timeout(10):
            raw = client.request("POST", "/v1/completions", body=b"{}", headers=headers or {})
            try:
                return sent_ns, read_stream(raw, meter)
            finally:
                client.close()


def test_events_merged_into_one_segment_are_all_read():
    def script(request):
        yield HEAD + http_chunk(event(completion(" a")) + event(completion(" b", finish_reason="length")) + DONE) + END

    meter = TokenMeter()
    read_over_http(script, meter)
    assert (meter.chunks, meter.gaps_ns, meter.done) == (2, [0], True)


def test_an_event_split_over_segments_counts_when_it_is_whole():
    whole = http_chunk(event(completion(" a", finish_reason="length")))

    def script(request):
        yield from (HEAD, 30, whole[:40], 60, whole[40:], http_chunk(DONE) + END)

    meter = TokenMeter()
    sent_ns, _ = read_over_http(script, meter)
    assert meter.chunks == 1
    assert meter.first_ns - sent_ns >= 85 * MS


def test_a_body_without_length_ends_with_the_connection():
    def script(request):
        yield from (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
            event(completion(" a", finish_reason="length")) + DONE,
            None,
        )

    meter = TokenMeter()
    read_over_http(script, meter)
    assert meter.verdict()[0] == "ok"


@pytest.mark.parametrize("cut", [http_chunk(event(completion(" a")))[:30], http_chunk(event(completion(" a")))])
def test_a_connection_closed_inside_the_answer_is_an_error(cut):
    meter = TokenMeter()
    with pytest.raises(BrokenStreamError):
        read_over_http(lambda request: [HEAD, http_chunk(event(completion(" a"))), cut, None], meter)
    assert meter.chunks >= 1
    assert meter.verdict()[1] == "truncated"


def test_broken_framing_is_an_error():
    with pytest.raises(BrokenStreamError):
        read_over_http(lambda request: [HEAD, 50, b"zz\r\nnonsense\r\n", None], TokenMeter())


def test_compressed_bytes_never_pass_for_tokens():
    squeezed = gzip.compress(event(completion(" a")) + DONE)
    meter = TokenMeter()
    read_over_http(lambda request: [HEAD, http_chunk(squeezed), END], meter)
    assert meter.verdict()[0] == "incomplete"
