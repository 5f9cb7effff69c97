"""Tenants: equal text under different salts, which no cache may share."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import (
    WORKLOADS,
    InfiniteCache,
    Streams,
    TraceError,
    WorkloadConfigError,
    analyze,
    ceiling_cached_tokens,
    convert_workload,
    make_workload,
    turn_by_turn,
)

GENERATORS = sorted(set(WORKLOADS) - {"trace"})


def drawn(table, seed=0):
    return list(make_workload(table).sessions(Streams(seed)))


@pytest.mark.parametrize("kind", GENERATORS)
def test_tenants_change_nothing_but_salts(kind):
    plain, dealt = drawn({"kind": kind}), drawn({"kind": kind, "tenants": 3})
    assert all(session.cache_salt is None for session in plain)
    assert [replace(session, cache_salt=None) for session in dealt] == plain
    assert {session.cache_salt for session in dealt} == {"tenant-0", "tenant-1", "tenant-2"}


@pytest.mark.parametrize("kind", sorted(set(GENERATORS) - {"agentic-coding"}))
def test_every_tenant_gets_its_share_of_the_sessions(kind):
    shares = Counter(session.cache_salt for session in drawn({"kind": kind, "tenants": 4}))
    assert max(shares.values()) - min(shares.values()) <= 1


def test_a_subagent_belongs_to_its_callers_tenant():
    salts = {}
    for session in drawn({"kind": "agentic-coding", "sessions": 6, "tenants": 4}):
        salts.setdefault(session.session_id.split("-sub")[0], set()).add(session.cache_salt)
    assert all(len(found) == 1 for found in salts.values())
    assert len(set.union(*salts.values())) == 4


def test_less_than_one_tenant_is_refused():
    with pytest.raises(WorkloadConfigError, match="tenants = 0: at least 1"):
        make_workload({"kind": "multi-turn", "tenants": 0})


@given(st.integers(1, 5), st.integers(0, 9))
@settings(deadline=None, max_examples=20)
def test_a_cache_with_salts_is_as_good_as_a_cache_for_each_tenant(tenants, seed):
    table = {"kind": "multi-turn", "sessions": 12, "turns": 2, "shared_system_prompts": 1, "tenants": tenants}
    sessions = drawn(table, seed)
    alone = [[s for s in sessions if s.cache_salt == salt] for salt in {s.cache_salt for s in sessions}]
    assert ceiling_cached_tokens(turn_by_turn(sessions), 16) == sum(
        ceiling_cached_tokens(turn_by_turn(mine), 16) for mine in alone
    )


def test_text_stored_under_one_salt_is_not_there_under_another():
    cache = InfiniteCache(16)
    cache.store([(1, 64)], "a")
    assert cache.lookup([(1, 64)], "a") == 48
    assert cache.lookup([(1, 64)], "b") == cache.lookup([(1, 64)]) == 0


def test_the_analysis_counts_blocks_by_salt_and_prompts_by_text():
    table = {"kind": "group-burst", "bursts": 3, "burst_size": 8}
    one, four = (analyze(make_workload(table | {"tenants": n}), Streams(0)) for n in (1, 4))
    assert four.distinct_prompts == one.distinct_prompts == 3
    prompts = 127 / 128  # of a prompt of 128 blocks the last is never a hit
    assert one.hit_rate == pytest.approx(7 / 8 * prompts)
    assert four.hit_rate == pytest.approx(4 / 8 * prompts)
    assert four.distinct_blocks > 3 * one.distinct_blocks


def test_a_native_trace_keeps_its_salts(tmp_path):
    table = {"kind": "multi-turn", "sessions": 5, "turns": 2, "tenants": 2}
    convert_workload(make_workload(table), tmp_path / "native.jsonl", streams=Streams(0))
    read = drawn({"kind": "trace", "path": str(tmp_path / "native.jsonl")})
    assert [session.cache_salt for session in read] == [session.cache_salt for session in drawn(table)]
    convert_workload(
        make_workload({"kind": "trace", "path": str(tmp_path / "native.jsonl")}),
        tmp_path / "again.jsonl",
        streams=Streams(0),
    )
    salts = [json.loads(line)["cache_salt"] for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    assert Counter(salts) == {"tenant-0": 6, "tenant-1": 4}


def test_a_trace_is_dealt_to_tenants_where_it_names_no_salt(tmp_path):
    path = tmp_path / "some.jsonl"
    rows = [{"timestamp": n, "input_length": 5, "output_length": 5} for n in range(4)]
    rows[1]["cache_salt"] = "mine"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [s.cache_salt for s in drawn({"kind": "trace", "path": str(path)})] == [None, "mine", None, None]
    salts = [s.cache_salt for s in drawn({"kind": "trace", "path": str(path), "tenants": 2})]
    assert salts == ["tenant-0", "mine", "tenant-0", "tenant-1"]
    convert_workload(
        make_workload({"kind": "trace", "path": str(path), "tenants": 2}), tmp_path / "out.jsonl", streams=Streams(0)
    )
    assert [json.loads(line)["cache_salt"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == salts


@pytest.mark.parametrize(
    ("salts", "said"), [(("a", "b"), ":2: cache_salt = 'b' in a session that began with 'a'"), (("",), "is empty")]
)
def test_a_salt_that_cannot_be_is_named_with_its_line(tmp_path, salts, said):
    path = tmp_path / "bad.jsonl"
    rows = [{"session_id": "s", "input_length": 5, "output_length": 5, "cache_salt": salt} for salt in salts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TraceError, match=said):
        drawn({"kind": "trace", "path": str(path)})
