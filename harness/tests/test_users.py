"""Locust users in a real process: what was sent, what became of it, and that all of it is accounted for."""

import re
import signal
import time
from itertools import pairwise

import msgspec
import pytest

from harness.tests.load_process import SMALL, Result, command, drawn, plan_for, run, started
from harness.tests.sse_server import DONE, END, HEAD, completion, event, honest, http_chunk, serve, usage
from workloads import prompt_token_ids


def test_every_turn_is_sent_once_in_order_and_the_process_ends_by_itself(tmp_path):
    workload = SMALL | {"sessions": 7, "turns": 3, "think_time_ms": 30}
    result, requests = run(tmp_path, honest, workload, warmup_sessions=2)
    assert result.code == 0, result.output
    sessions = drawn(workload)
    prompts = {f"{s.session_id}-{t.index}": prompt_token_ids(p).tolist() for s in sessions for t, p in s.prompts()}
    assert {r.headers["x-request-id"]: r.body["prompt"] for r in requests} == prompts
    assert len(requests) == len(prompts) == len(result.rows)
    result.assert_accounted()
    for session in sessions:
        rows = [result.row(session.session_id, t) for t in range(3)]
        assert {r["phase"] for r in rows} == {"warmup" if session in sessions[:2] else "steady"}
        assert [r["answer_ok"] for r in rows] == [True, None, None]
        for before, after in pairwise(rows):
            assert after["scheduled_us"] == before["end_us"] + 30_000
        for row in rows:
            assert row["scheduled_us"] <= row["sent_us"] < row["first_token_us"] <= row["second_token_us"]
            assert row["last_token_us"] <= row["end_us"]
            assert row["last_token_us"] - row["first_token_us"] == pytest.approx(sum(row["chunk_gaps_us"]), abs=4)
            assert (row["status"], row["output_tokens"], row["cached_tokens"]) == ("ok", 4, 0)
            assert row["token_source"] == "usage"
            assert row["prompt_tokens"] == len(prompts[row["request_id"]])
    for request in requests:
        assert request.headers["accept-encoding"] == "identity"
        assert request.headers["x-session-id"] == request.headers["x-request-id"].rpartition("-")[0]
    # One event a request in Locust's own table; the rows for TTFT and TPOT stay out of its total.
    assert re.search(r"POST +/v1/completions +21 +0\(", result.output)
    assert re.search(r"METRIC +TTFT +21 ", result.output)
    assert re.search(r"Aggregated +21 +0\(", result.output)


ENGINE_ERROR = msgspec.json.encode(
    {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
)


def plain(status, body, kind=b"application/json"):
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


TOKEN = http_chunk(event(completion(" a")))
# What goes wrong, by session; the first of two turns is answered well where the second is to fail.
WRONG = {
    "s00000": [HEAD, TOKEN, TOKEN, None],
    "s00001": [HEAD, TOKEN, http_chunk(event({"error": {"message": "gone", "code": 500}}) + DONE) + END],
    "s00002": [plain(b"400 Bad Request", ENGINE_ERROR)],
    "s00003": [plain(b"500 Internal Server Error", ENGINE_ERROR)],
    "s00004": [plain(b"502 Bad Gateway", b"<html>no replica</html>", b"text/html")],
    "s00005": [
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
        b"content-length: 2\r\n\r\n\x1f\x8b"
    ],
    "s00006": [None],
    "s00007": [HEAD, TOKEN, 60_000],
    "s00008": [60_000],
    "s00009": [plain(b"200 OK", b'{"choices": []}')],
    "s00010": [HEAD, TOKEN, http_chunk(event(usage(40, 1)) + DONE) + END],
    "s00011": [HEAD, http_chunk(DONE) + END],
    "s00012": [plain(b"503 Service Unavailable\r\nX-Routebench-Router-Error: NoReplica", ENGINE_ERROR)],
}


def misbehave(request):
    """Fails the second turn as `WRONG` says."""
    session, _, turn = request.headers["x-request-id"].rpartition("-")
    return WRONG[session[:6]] if turn == "1" else honest(request)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("failures")
    result, _ = run(tmp_path, misbehave, SMALL | {"sessions": 13, "turns": 4}, concurrency=13, request_timeout_s=1.5)
    return result


@pytest.mark.parametrize(
    ("session", "status", "error_class", "tokens"),
    [
        ("s00000", "incomplete", "truncated", 2),
        ("s00001", "incomplete", "engine", 1),
        ("s00002", "error", "engine_4xx", 0),
        ("s00003", "error", "engine_5xx", 0),
        ("s00004", "error", "router", 0),
        ("s00005", "incomplete", "protocol", 0),
        ("s00006", "error", "router", 0),
        ("s00007", "incomplete", "timeout", 1),
        ("s00008", "error", "timeout", 0),
        ("s00009", "incomplete", "protocol", 0),
        ("s00010", "error", "answer", 1),
        ("s00011", "incomplete", "truncated", 0),
        ("s00012", "error", "router", 0),
    ],
)
def test_a_lost_answer_is_never_a_success(failures, session, status, error_class, tokens):
    row = failures.row(session, 1)
    assert (row["status"], row["error_class"], row["output_tokens"]) == (status, error_class, tokens)
    assert row["error"]
    assert failures.row(session, 0)["status"] == "ok"


def test_a_failed_turn_ends_its_session_and_the_rest_is_listed(failures):
    failures.assert_accounted()
    assert len(failures.rows) == 13 * 4
    for row in failures.rows:
        if row["turn"] > 1:
            assert (row["sent_us"], row["status"], row["error_class"]) == (None, "cancelled", "cut")
            assert "turn 1 of the session ended as" in row["error"]
    assert failures.ends[0]["not_sent"] == 26


def test_failures_are_lumped_by_class_in_locusts_table_and_do_not_change_the_exit_code(failures):
    assert failures.code == 0
    assert re.search(r"POST +/v1/completions +26 +13\(50", failures.output)
    assert "engine_4xx: an engine refused the request" in failures.output


READ_S = 1.0
"""For the load process to read a token that has left the server of this very machine; loose."""


@pytest.mark.parametrize("end", ["run time", "SIGTERM", "SIGINT"])
def test_requests_in_flight_at_the_end_are_cancelled_rows(tmp_path, end):
    """The run time is loose: within it three sessions get to the first token of their second turn."""
    held = []

    def slow_second_turn(request):
        if not request.headers["x-request-id"].endswith("-1"):
            yield from honest(request)
            return
        yield from (HEAD, TOKEN)
        held.append(request)
        yield 60_000

    workload = SMALL | {"sessions": 9, "turns": 3}
    plan = plan_for(tmp_path, workload)
    with serve(slow_second_turn) as server:
        extra = ["--run-time", "8"] if end == "run time" else []
        with started(tmp_path, command(tmp_path, server.url, plan, *extra)) as process:
            if not extra:
                limit = time.monotonic() + 30
                while len(held) < 3 and time.monotonic() < limit:
                    time.sleep(0.05)
                time.sleep(READ_S)
                process.send_signal(getattr(signal, end))
            output, _ = process.communicate(timeout=60)
    result = Result(plan.rows_dir, process.returncode, output)
    result.assert_accounted()
    assert [r["status"] for r in result.rows if r["turn"] == 1] == ["cancelled"] * 3
    for row in (r for r in result.rows if r["turn"] == 1):
        assert (row["error_class"], row["output_tokens"]) == ("cut", 1)
        assert row["end_us"] > row["first_token_us"]
    assert [r["sent_us"] for r in result.rows if r["turn"] == 2] == [None] * 3
    assert result.ends[0]["sessions_started"] == 3


def test_a_step_behind_a_barrier_starts_when_the_step_before_has_ended(tmp_path):
    def staggered(request):
        yield 40.0 * (request.number % 4)
        yield from honest(request)

    workload = {
        "kind": "rl-rollout",
        "steps": 3,
        "rollouts_per_step": 4,
        "turns": 2,
        "first_input_tokens": 20,
        "output_tokens": 3,
        "stragglers": 1,
        "straggler_last_output_tokens": 9,
        "barrier": True,
    }
    result, _ = run(tmp_path, staggered, workload, concurrency=6)
    assert result.code == 0, result.output
    result.assert_accounted()
    for step in (1, 2):
        starts = [r["sent_us"] for r in result.rows if r["rollout_step"] == step]
        ends = [r["end_us"] for r in result.rows if r["rollout_step"] == step - 1]
        assert min(starts) >= max(ends)
        assert len(starts) == 8


def test_without_a_barrier_steps_stream_into_each_other(tmp_path):
    workload = {
        "kind": "rl-rollout",
        "steps": 2,
        "rollouts_per_step": 3,
        "turns": 2,
        "first_input_tokens": 20,
        "output_tokens": 3,
        "stragglers": 0,
    }
    result, _ = run(tmp_path, lambda r: [60.0, *honest(r)], workload, concurrency=6)
    assert len({r["scheduled_us"] // 50_000 for r in result.rows if r["turn"] == 0}) <= 2
    assert result.code == 0


def test_slots_of_a_ramp_open_one_after_the_other(tmp_path):
    result, _ = run(tmp_path, lambda r: [600.0, *honest(r)], SMALL | {"sessions": 3, "turns": 1}, ramp_s=0.6)
    due = sorted(r["scheduled_us"] for r in result.rows)
    assert [b - a for a, b in pairwise(due)] == [pytest.approx(200_000, abs=30_000)] * 2
    assert all(r["sent_us"] >= r["scheduled_us"] for r in result.rows)


@pytest.mark.parametrize("api", ["completions-text", "chat"])
def test_text_conversations_go_on_from_the_live_answer(tmp_path, api):
    result, requests = run(tmp_path, honest, SMALL | {"sessions": 2}, api=api)
    assert result.code == 0
    assert {r.path for r in requests} == {"/v1/chat/completions" if api == "chat" else "/v1/completions"}
    for request in (r for r in requests if r.headers["x-request-id"].endswith("-1")):
        text = (
            request.body["prompt"]
            if api == "completions-text"
            else next(m["content"] for m in request.body["messages"] if m["role"] == "assistant")
        )
        assert text.count(" w") == 4
    assert {r["answer_ok"] for r in result.rows} == {None}


def test_an_address_that_nobody_listens_on_is_the_routers_error(tmp_path):
    plan = plan_for(tmp_path, SMALL | {"sessions": 2})
    with serve(honest) as server:
        url = server.url
    with started(tmp_path, command(tmp_path, url, plan)) as process:
        output, _ = process.communicate(timeout=30)
    result = Result(plan.rows_dir, process.returncode, output)
    result.assert_accounted()
    assert {(r["status"], r["error_class"]) for r in result.rows if r["turn"] == 0} == {("error", "router")}
