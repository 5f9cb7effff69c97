"""Scenarios: every built-in one is sound, and every wrong one says which key and what to do."""

import pytest

from harness.arm import arms_of
from harness.errors import UsageError
from harness.scenario import builtin_names, check_scenario, load_scenario
from harness.sim import Simulation
from harness.tests.arms import small

GOOD = {
    "name": "t",
    "routers": ["round-robin"],
    "engine": {"preset": "llama-3.1-8b-h100"},
    "workload": {"kind": "multi-turn", "sessions": 2, "turns": 2},
}


def refused(table: dict) -> str:
    with pytest.raises(UsageError) as caught:
        check_scenario(table, "file.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("file.toml")
    return message


@pytest.mark.parametrize("name", builtin_names())
def test_every_built_in_scenario_is_sound_and_says_what_it_is_about(name):
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.about


@pytest.mark.parametrize("name", builtin_names())
def test_a_resolved_scenario_is_itself_a_scenario(name):
    scenario = load_scenario(name)
    assert check_scenario(scenario.resolved(), "again").resolved() == scenario.resolved()


def test_an_unknown_key_is_named_with_its_nearest_neighbour():
    assert "'concurency' in load: did you mean 'concurrency'?" in refused({**GOOD, "load": {"concurency": 3}})
    assert "'routrs' in the top level: did you mean 'routers'?" in refused({**GOOD, "routrs": []})
    assert "'blocksize' in engine: did you mean 'block_size'?" in refused({**GOOD, "engine": {"blocksize": 16}})
    assert "'session' in workload" in refused({**GOOD, "workload": {"kind": "multi-turn", "session": 3}}).replace(
        "key ", ""
    )


def test_a_wrong_type_is_named_with_its_key():
    message = refused({**GOOD, "load": {"concurrency": "many"}})
    assert "load.concurrency" in message
    assert "a whole number" in message


def test_a_value_that_cannot_work_says_why():
    assert "at least 1 session slot" in refused({**GOOD, "load": {"concurrency": 0}})
    assert "at least 1 replica" in refused({**GOOD, "fleet": {"replicas": 0}})
    assert "seed = -1" in refused({**GOOD, "seed": -1})
    assert "above 0 ms" in refused({**GOOD, "slo": {"ttft_ms": 0}})
    assert "did you mean 'ttft_ms'" in refused({**GOOD, "slo": {"ttft": 100}})


def test_an_unknown_router_lists_the_choices():
    message = refused({**GOOD, "routers": ["round-robbin"]})
    assert "round-robbin" in message
    assert "round-robin" in message
    assert "dynamo-kv" in message


def test_an_unknown_option_of_a_router_lists_its_options():
    message = refused({**GOOD, "routers": [{"name": "d", "policy": "dynamo-kv", "options": {"temprature": 1}}]})
    assert "temperature" in message


def test_a_router_named_twice_is_refused():
    assert "stands twice" in refused({**GOOD, "routers": ["random", "random"]})


def test_no_router_is_refused():
    assert "routers is empty" in refused({**GOOD, "routers": []})


def test_a_router_with_url_and_policy_is_refused():
    assert "policy and url" in refused({**GOOD, "routers": [{"name": "x", "url": "http://a", "policy": "random"}]})


def test_a_session_longer_than_a_replicas_cache_is_refused_before_anything_starts():
    message = refused({**GOOD, "engine": {"preset": "llama-3.1-8b-h100", "num_gpu_blocks": 4}})
    assert "num_gpu_blocks" in message


def test_an_unknown_preset_lists_the_presets():
    message = refused({**GOOD, "engine": {"preset": "llama-9"}})
    assert "llama-3.1-8b-h100" in message


def test_overrides_reach_any_key_and_are_checked_like_the_file():
    scenario = load_scenario(
        "quickstart", overrides=["load.concurrency=3", "workload.sessions = 5", "engine.num_gpu_blocks=2000"]
    )
    assert scenario.load.concurrency == 3
    assert scenario.workload["sessions"] == 5
    assert scenario.engine.num_gpu_blocks == 2000
    with pytest.raises(UsageError, match="key=value"):
        load_scenario("quickstart", overrides=["load.concurrency"])
    with pytest.raises(UsageError, match="did you mean 'concurrency'"):
        load_scenario("quickstart", overrides=["load.concurrenzy=3"])
    with pytest.raises(UsageError, match="'name' is a value"):
        load_scenario("quickstart", overrides=["name.x=3"])


def test_an_unknown_scenario_lists_the_built_in_ones_and_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'quickstart'"):
        load_scenario("quikstart")
    with pytest.raises(UsageError, match="No such file"):
        load_scenario(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_scenario(str(broken))
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_scenario(str(broken))


def test_block_count_follows_the_preset_unless_given():
    from mock_engine import load_preset

    assert check_scenario(GOOD, "f").engine.num_gpu_blocks == load_preset("llama-3.1-8b-h100").num_gpu_blocks
    wider = check_scenario({**GOOD, "engine": {"preset": "llama-3.1-8b-h100", "block_size": 32}}, "f")
    assert wider.engine.num_gpu_blocks == load_preset("llama-3.1-8b-h100").num_gpu_blocks // 2


def test_a_real_router_is_named_by_its_preset_and_variant():
    (entry,) = check_scenario({**GOOD, "routers": ["vllm-router:kv_aware"]}, "f").routers
    assert entry.peer == "vllm-router:kv_aware"
    assert entry.foreign
    (entry,) = check_scenario(
        {**GOOD, "routers": [{"name": "v", "preset": "vllm-router", "args": ["--policy", "round_robin"]}]}, "f"
    ).routers
    assert entry.peer == "vllm-router"
    assert "cannot carry load.api" in refused({**GOOD, "routers": ["sglang-router"]})
    assert "no preset named" in refused({**GOOD, "routers": [{"name": "v", "preset": "nope"}]})


def test_a_command_template_is_one_way_and_options_are_for_policies_of_ours():
    (entry,) = check_scenario(
        {**GOOD, "routers": [{"name": "mine", "command": ["mine", "--port", "{port}"]}]}, "f"
    ).routers
    assert entry.foreign
    assert "command and url" in refused({**GOOD, "routers": [{"name": "x", "command": ["a"], "url": "http://a"}]})
    assert "use args" in refused({**GOOD, "routers": [{"name": "x", "command": ["a"], "options": {"b": 1}}]})
    assert "use options" in refused({**GOOD, "routers": [{"name": "random", "args": ["--b"]}]})


def test_labels_of_arms_differ_even_where_names_only_differ_in_what_a_folder_cannot_hold():
    routers = [
        {"name": "a/b", "policy": "random"},
        {"name": "a_b", "policy": "random"},
        {"name": "A_B", "policy": "random"},
    ]
    labels = [arm.label.casefold() for arm in arms_of(check_scenario({**GOOD, "routers": routers}, "f"))]
    assert len(set(labels)) == 3
    assert [arm.label for arm in arms_of(check_scenario(GOOD, "f"))] == ["round-robin.0"]


@pytest.mark.parametrize("name", ["", "../up", "/abs", "a\0b", "x" * 300, ".hidden"])
def test_a_name_that_cannot_name_a_folder_is_refused(name):
    assert "names folders" in refused({**GOOD, "name": name})


@pytest.mark.parametrize("router", ["", "a b", ":P", "x'"])
def test_a_router_name_that_cannot_be_one_is_refused(router):
    refused({**GOOD, "routers": [router]})


def test_numbers_out_of_all_proportion_are_refused_in_one_line():
    workload = {"kind": "multi-turn", "sessions": 2, "turns": 1}
    assert "at most" in refused({**GOOD, "fleet": {"replicas": 10**9}})
    refused({**GOOD, "workload": {**workload, "output_tokens": {"dist": "exponential", "mean": 1e308}}})
    with pytest.raises(UsageError, match="one line"):
        load_scenario("quickstart", overrides=["load..concurrency=1"])
    with pytest.raises(UsageError):
        load_scenario("quickstart", overrides=["seed=" + "[" * 3000])


def test_sessions_that_outgrow_the_model_are_a_slip_unless_they_are_meant():
    long = {**GOOD, "engine": {**GOOD["engine"], "max_model_len": 64}}
    assert "write load.overlong = 'send'" in refused(long)
    meant = check_scenario({**long, "load": {**GOOD.get("load", {}), "overlong": "send"}}, "good")
    assert meant.resolved()["load"]["overlong"] == "send"


def test_an_engine_answers_what_is_too_long_with_400_and_the_session_ends():
    scenario = load_scenario("client-errors", overrides=["workload.requests=60", "load.rate_per_s=20"])
    rows = Simulation(arms_of(scenario)[0]).run().requests
    refused_ = [row for row in rows if row["status"] == "error"]
    assert refused_
    for row in refused_:
        assert row["error_class"] == "engine_4xx"
        assert row["prompt_tokens"] + 100 > scenario.engine.max_model_len
    assert all(row["status"] == "ok" for row in rows if row["prompt_tokens"] + 100 <= scenario.engine.max_model_len)


def test_what_would_swell_every_report_or_never_end_is_refused():
    with pytest.raises(UsageError, match="about has 20,000,000 characters, at most 2,000"):
        small(about="x" * 20_000_000)
    with pytest.raises(UsageError, match="routers has 5,000 entries, at most 1,000"):
        small(routers=[{"name": f"r{n}", "policy": "random"} for n in range(5000)])
