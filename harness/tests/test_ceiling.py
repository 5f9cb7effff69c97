"""The ceiling of one endless cache, whatever form prompts travel in: nobody can pass it, or it is not known."""

import msgspec
import pytest

from harness.ceiling import ceiling_of
from harness.chat_form import templated
from harness.load_plan import Conversation, LoadPlan
from harness.sim import Simulation
from harness.sse import Event
from harness.tests.arms import arm, small
from harness.tests.sse_server import chat, event, usage
from mock_engine.chat import load_template
from mock_engine.tokenizer import WordTokenizer
from workloads import Streams, make_workload, prompt_tokens, span_text, token_ids

CHATS = [
    {"kind": "multi-turn", "sessions": 4, "turns": 4, "shared_system_prompts": 2, "first_input_tokens": 40},
    {"kind": "multi-turn", "sessions": 2, "turns": 3, "timestamp_prefix": True},
    {"kind": "agentic-coding", "sessions": 2},
    {"kind": "rag", "requests": 4},
]


@pytest.mark.parametrize("table", CHATS, ids=lambda table: "-".join(map(str, table.values())))
def test_a_templated_prompt_is_what_a_replica_renders_token_for_token(table):
    tokenizer = WordTokenizer()
    template = load_template(None, None)
    plan = LoadPlan(workload=table, seed=1, rows_dir="rows", epoch_ns=0, api="chat")
    marks: dict[int, int] = {}
    for session in make_workload(table).sessions(Streams(5)):
        conversation = Conversation(plan, session)
        for turn in session.turns:
            body = msgspec.json.decode(conversation.body(turn))
            rendered = template.render(body["messages"], add_generation_prompt=True)
            ids = tokenizer.encode(rendered, add_special_tokens=False)
            spans = templated(session, turn.index)
            assert len(ids) == prompt_tokens(spans)
            for span_id, tokens in spans:
                here, ids = ids[:tokens], ids[tokens:]
                if span_id < 0:
                    assert marks.setdefault(span_id, here[0]) == here[0]
                else:
                    assert here == token_ids(span_id, 0, tokens).tolist()
            meter = conversation.meter(turn)
            said = span_text(turn.output[0], 0, turn.output[1])
            for sent in (chat({"content": said}, finish_reason="length"), usage(9, turn.output[1])):
                meter.event(Event(event(sent)[6:-2]), 1)
            conversation.answered(turn, meter)
    assert len(set(marks.values())) == len(marks)


def rows_of(api, length):
    """Rows of a simulated arm whose engines saw prompts of `length(session, turn)` tokens."""
    one = arm(small(load={"api": api}))
    sessions = {s.session_id: s for s in one.scenario.make_workload().sessions(Streams(one.workload_seed))}
    rows = Simulation(one).run().requests
    return one, [row | {"prompt_tokens": length(sessions[row["session"]], row["turn"])} for row in rows]


def test_the_template_of_a_chat_is_cached_too_and_counts():
    plain, _ = ceiling_of(*rows_of("chat", lambda session, turn: prompt_tokens(session.prompt(turn))))
    marked, _ = ceiling_of(*rows_of("chat", lambda session, turn: prompt_tokens(templated(session, turn))))
    assert marked > plain > 0


@pytest.mark.parametrize("api", ["completions-ids", "completions-text", "chat"])
def test_prompts_of_another_length_have_other_blocks_so_that_the_ceiling_is_not_known(api):
    """As with engines that run outside, with a tokenizer or a template of their own."""
    one, rows = rows_of(api, lambda session, turn: prompt_tokens(session.prompt(turn)) + 11)
    hits, different = ceiling_of(one, rows)
    assert hits is None
    assert different == len({(row["session"], row["turn"]) for row in rows if row["phase"] == "steady"})
