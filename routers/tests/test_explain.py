"""Every policy explains itself whole: what it believes, needs and takes, whose it is, and when it fails."""

import msgspec
import pytest

from routers import POLICIES, Options, Signal, policy_explain, policy_names
from routers.explain import NOTES, option_help
from routers.policies.filters import FILTERS
from routers.policies.scorers import SCORERS, ScorerOptions


@pytest.mark.parametrize("name", policy_names())
def test_no_policy_without_an_explanation_and_no_option_without_a_source(name):
    found = policy_explain(name)
    for text in (found.about, found.believes, found.source, found.fails):
        assert len(text) >= 8
        assert "\n" not in text
    for text in (found.believes, found.fails):
        assert text[-1] == "."
    assert [option.name for option in found.options] == [
        field.name for field in msgspec.structs.fields(POLICIES[name].Options)
    ]
    for option in found.options:
        assert len(option.about) > 10, f"{name}.{option.name}: says nothing"
        assert len(option.source) > 3, f"{name}.{option.name}: has no source"
        assert option.kind
    assert msgspec.json.encode(found)


def test_help_never_names_an_option_that_is_not_there():
    for kind in [*(policy.Options for policy in POLICIES.values()), ScorerOptions]:
        assert set(option_help(kind)) <= {field.name for field in msgspec.structs.fields(kind)}


def test_explanations_are_each_policys_own():
    for attribute in ("about", "fails"):
        texts = [getattr(policy_explain(name), attribute) for name in policy_names()]
        assert len(set(texts)) == len(texts)


def test_every_signal_has_a_word():
    assert set(NOTES) == {signal.value for signal in Signal}


def test_a_known_option_reads_as_written():
    options = {option.name: option for option in policy_explain("session-ring-valve").options}
    limit = options["kv_usage_limit"]
    assert (limit.kind, limit.default) == ("float", 0.85)
    assert limit.about == "share of a replica's KV blocks in use at which a turn spills."
    assert limit.source == "First strategy of the reference text on prefix-aware routing"
    assert options["virtual_nodes"].source.startswith("As vllm-router's `consistent_hash`")
    copies = {option.name: option for option in policy_explain("vllm-kv-aware").options}["count_copies"]
    assert copies.source == "ours"
    assert copies.about.endswith("takes two removals to go")


def test_a_variants_values_are_the_defaults_that_are_shown():
    options = {option.name: option.default for option in policy_explain("dynamo-kv:decay").options}
    assert options["overlap_score_credit_decay"] == 1.0


def test_what_a_derived_set_says_anew_wins():
    options = {option.name: option for option in policy_explain("dynamo-load-aware").options}
    assert options["overlap_score_credit"].about.startswith("0: nothing is forgiven")
    assert options["overlap_score_credit"].default == 0
    assert options["temperature"].source.startswith("Names and defaults of Dynamo 1.4.2")
    scorers = policy_explain("llmd-precise-prefix").options[0]
    assert scorers.default == [
        {"scorer": "precise-prefix", "weight": 2},
        {"scorer": "kv-cache-utilization"},
        {"scorer": "queue-depth"},
    ]


def test_llmds_scorers_and_filters_are_all_named_where_they_are_given():
    options = {option.name: option for option in policy_explain("llmd-precise-prefix").options}
    assert [name for name in FILTERS if name not in options["filters"].about] == []
    about = policy_explain("llmd-approx-prefix").options[0].about
    assert [name for name in SCORERS if name not in about] == []


def test_an_option_is_told_apart_from_its_neighbours():
    for name in policy_names():
        abouts = [option.about for option in policy_explain(name).options]
        assert len(set(abouts)) == len(abouts), f"{name}: {max(abouts, key=abouts.count)!r} stands at several options"


def test_a_policy_of_ones_own_may_say_nothing(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "class Mine:\n"
        "    needs = frozenset()\n"
        "    def __init__(self, options, *, rng, block_size): pass\n"
        "    def choose(self, turn, fleet): ...\n"
        "    def observe(self, event): ...\n"
    )
    found = policy_explain(f"{path}:Mine")
    assert (found.believes, found.options, found.needs) == ("", (), {})


def test_an_item_may_run_over_lines_and_name_its_own_source():
    class Some(Options, frozen=True):
        """Theirs.

        More of it.

        - `a`, `b`: one
          two [elsewhere].
        - `c`: three.

        The end.
        """

        a: int = 1
        b: int = 2
        c: int = 3

    assert option_help(Some) == {
        "a": ("one two", "elsewhere"),
        "b": ("one two", "elsewhere"),
        "c": ("three.", "Theirs"),
    }


def test_what_the_imitated_router_has_and_this_one_refuses_is_told_with_the_reason():
    refused = policy_explain("dynamo-load-aware").refused
    assert "taints" in refused["routing_constraints"]
    assert not refused.keys() & {option.name for option in policy_explain("dynamo-load-aware").options}
    assert policy_explain("random").refused == {}


def test_each_knob_that_is_not_of_the_configuration_itself_names_its_source():
    options = {option.name: option for option in policy_explain("dynamo-kv").options}
    assert options["queue_threshold"].source == "1.4.2, `scheduling/queue.rs`"
    assert options["active_decode_blocks_threshold"].source == "1.4.2, `discovery/worker_monitor.rs`"
    assert "03037af" in options["cost_policy"].source
