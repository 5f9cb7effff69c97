import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.load_plan import AnswerError, Conversation, LoadPlan, ids_json, read_plan
from harness.sse import Event
from harness.tests.sse_server import chat, completion, event, usage
from mock_engine.tokenizer import WordTokenizer
from workloads import Session, Streams, Turn, make_workload, prompt_token_ids, span_text, token_ids

SESSION = Session(
    "s",
    (
        Turn(0, ((11, 20), (12, 30)), (13, 5)),
        Turn(1, ((14, 7),), (15, 6)),
        Turn(2, (), (16, 4)),
    ),
)


def plan(**fields):
    return LoadPlan(**{"workload": {"kind": "multi-turn"}, "seed": 1, "rows_dir": "rows", "epoch_ns": 0, **fields})


def answer(conversation, turn, ids, api="completions-ids", n=None):
    """A meter that got these ids one a chunk, and usage."""
    meter = conversation.meter(turn)
    for k, token in enumerate(ids):
        finish = "length" if k == len(ids) - 1 else None
        chunk = (
            chat({"content": f" w{token}"}, finish_reason=finish)
            if api == "chat"
            else completion(f" w{token}", token_ids=[token], finish_reason=finish)
        )
        meter.event(Event(event(chunk)[6:-2]), k + 1)
    meter.event(Event(event(usage(50, len(ids) if n is None else n))[6:-2]), 100)
    return meter


def ours(turn):
    return token_ids(turn.output[0], 0, turn.output[1]).tolist()


def test_a_body_of_ids_is_the_workloads_prompt_and_its_answer_is_named_by_the_seed():
    conversation = Conversation(plan(), SESSION)
    for turn in SESSION.turns:
        body = msgspec.json.decode(conversation.body(turn))
        assert body.pop("prompt") == prompt_token_ids(SESSION.prompt(turn.index)).tolist()
        assert conversation.prompt_tokens() == len(prompt_token_ids(SESSION.prompt(turn.index)))
        ids_wanted = {"return_token_ids": True} if turn.index == 0 else {}
        assert body == {
            "model": "mock-model",
            "max_tokens": turn.output[1],
            "ignore_eos": True,
            "seed": turn.output[0],
            "stream": True,
            "stream_options": {"include_usage": True},
            **ids_wanted,
        }
        checked = conversation.answered(turn, answer(conversation, turn, ours(turn)))
        assert checked is (True if turn.index == 0 else None)


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_bodies_depend_on_the_seed_only(seed):
    def bodies():
        for session in make_workload({"kind": "rl-rollout", "steps": 1, "turns": 2}).sessions(Streams(seed)):
            conversation = Conversation(plan(), session)
            for turn in session.turns:
                yield conversation.body(turn)
                conversation.answered(turn, answer(conversation, turn, ours(turn)))

    assert list(bodies()) == list(bodies())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids: [*ids[:-1], 1000 + (ids[-1] + 1) % 1000], "token 4 of the answer is not the one"),
        (lambda ids: ids[:-1], "4 tokens came and 5 were asked for"),
    ],
)
def test_another_answer_than_the_seeds_is_refused(change, says):
    conversation = Conversation(plan(), SESSION)
    turn = SESSION.turns[0]
    conversation.body(turn)
    with pytest.raises(AnswerError, match=says):
        conversation.answered(turn, answer(conversation, turn, change(ours(turn))))


def test_an_answer_whose_ids_are_missing_is_not_called_verified():
    conversation = Conversation(plan(), SESSION)
    conversation.body(SESSION.turns[0])
    meter = answer(conversation, SESSION.turns[0], ours(SESSION.turns[0]))
    meter.token_ids = None
    with pytest.raises(AnswerError, match="no token_ids came"):
        conversation.answered(SESSION.turns[0], meter)


def test_which_turns_are_verified_is_the_plans_choice():
    def asked(verify):
        conversation = Conversation(plan(verify_answers=verify), SESSION)
        for turn in SESSION.turns:
            yield "return_token_ids" in msgspec.json.decode(conversation.body(turn))

    assert list(asked("first")) == [True, False, False]
    assert list(asked("all")) == [True, True, True]
    assert list(asked("none")) == [False, False, False]


def test_live_answers_become_the_history_as_they_came():
    conversation = Conversation(plan(answers="live"), SESSION)
    first, second, third = SESSION.turns
    conversation.body(first)
    assert conversation.answered(first, answer(conversation, first, [7, 8])) is None
    expected = [*prompt_token_ids(first.input), 7, 8, *prompt_token_ids(second.input)]
    assert msgspec.json.decode(conversation.body(second))["prompt"] == expected
    # An engine that gives no ids: the drawn answer stands in.
    meter = answer(conversation, second, [9])
    meter.token_ids = None
    conversation.answered(second, meter)
    assert msgspec.json.decode(conversation.body(third))["prompt"] == [*expected, *ours(second)]


def test_text_history_carries_the_live_answer():
    conversation = Conversation(plan(api="completions-text"), SESSION)
    first, second, _ = SESSION.turns
    opening = span_text(11, 0, 20) + span_text(12, 0, 30)
    assert msgspec.json.decode(conversation.body(first))["prompt"] == opening
    conversation.answered(first, answer(conversation, first, [1, 2]))
    assert msgspec.json.decode(conversation.body(second))["prompt"] == f"{opening} w1 w2{span_text(14, 0, 7)}"
    assert conversation.prompt_tokens() is None


def test_chat_history_carries_the_live_answer_as_the_assistants():
    conversation = Conversation(plan(api="chat"), SESSION)
    first, second, _ = SESSION.turns
    opening = [{"role": "system", "content": span_text(11, 0, 20)}, {"role": "user", "content": span_text(12, 0, 30)}]
    body = msgspec.json.decode(conversation.body(first))
    assert body["messages"] == opening
    assert (body["max_tokens"], body["seed"]) == (5, 13)
    conversation.answered(first, answer(conversation, first, [1, 2], api="chat"))
    assert msgspec.json.decode(conversation.body(second))["messages"] == [
        *opening,
        {"role": "assistant", "content": " w1 w2"},
        {"role": "user", "content": span_text(14, 0, 7)},
    ]


def test_the_text_of_a_span_has_the_spans_ids_in_our_replicas_vocabulary():
    tokenizer = WordTokenizer()
    assert tokenizer.encode(span_text(11, 0, 200), add_special_tokens=False) == token_ids(11, 0, 200).tolist()


@given(st.lists(st.integers(1000, 30999), max_size=30), st.lists(st.integers(0, 200_000), max_size=5))
@settings(deadline=None)
def test_ids_are_written_as_a_json_array(ours, foreign):
    for ids in (ours, [*ours, *foreign]):
        assert msgspec.json.decode(ids_json(np.array(ids, dtype=np.int64))) == ids
        assert msgspec.json.decode(ids_json(np.array(ids, dtype=np.int32))) == ids


def test_a_plan_is_read_back_as_it_was_written(tmp_path):
    written = plan(api="chat", warmup_sessions=3)
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(written))
    assert read_plan(tmp_path / "plan.json") == written


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read the load plan"),
        ("{", "cannot be used"),
        ('{"seed": 1, "workload": {}, "rows_dir": "", "epoch_ns": 0, "slots": 3}', "unknown field `slots`"),
        ('{"seed": 1, "workload": {"kind": "x"}, "rows_dir": "", "epoch_ns": 0}', "no workload of kind 'x'"),
        ('{"seed": 1, "workload": {}, "rows_dir": "", "epoch_ns": 0, "concurrency": 0}', "concurrency = 0"),
        ('{"seed": 1, "workload": {}, "rows_dir": "", "epoch_ns": 0, "api": "text"}', "api"),
        (
            '{"seed": 1, "workload": {}, "rows_dir": "", "epoch_ns": 0, "session_header": "a b"}',
            "session_header = 'a b'",
        ),
    ],
)
def test_a_plan_that_cannot_be_used_is_an_error_that_says_why(tmp_path, text, says):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_plan(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


FRONTED = Session(
    "f",
    (
        Turn(0, ((11, 20), (12, 30)), (13, 5), front=(21, 1)),
        Turn(1, ((14, 7),), (15, 6), front=(22, 1)),
    ),
)


def test_what_stands_in_front_of_one_request_is_no_part_of_the_next():
    conversation = Conversation(plan(), FRONTED)
    for turn in FRONTED.turns:
        body = msgspec.json.decode(conversation.body(turn))
        assert body["prompt"] == prompt_token_ids(FRONTED.prompt(turn.index)).tolist()
        assert conversation.prompt_tokens() == len(body["prompt"])
        conversation.answered(turn, answer(conversation, turn, ours(turn)))


@pytest.mark.parametrize("api", ["completions-text", "chat"])
def test_text_in_front_comes_first_and_leaves_with_its_request(api):
    conversation = Conversation(plan(api=api), FRONTED)
    for turn, other in zip(FRONTED.turns, FRONTED.turns[::-1], strict=True):
        body = msgspec.json.decode(conversation.body(turn))
        text = body["prompt"] if api == "completions-text" else "".join(m["content"] for m in body["messages"])
        assert text.startswith(span_text(turn.front[0], 0, 1))
        assert span_text(other.front[0], 0, 1) not in text
        conversation.answered(turn, answer(conversation, turn, ours(turn), api))


def test_a_turn_that_starts_over_carries_nothing_of_what_was_said_before():
    turns = (Turn(0, ((1, 20),), (2, 5)), Turn(1, ((3, 30),), (4, 5), restart=True), Turn(2, ((5, 7),), (6, 5)))
    session = Session("s", turns)
    conversation = Conversation(plan(), session)
    for turn in turns:
        body = msgspec.json.decode(conversation.body(turn))
        assert body["prompt"] == prompt_token_ids(session.prompt(turn.index)).tolist()
        conversation.answered(turn, answer(conversation, turn, ours(turn)))
