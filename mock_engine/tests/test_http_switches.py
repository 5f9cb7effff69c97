"""Pauses, sleep, aborts, limits, clients that leave and an engine that fails; what is logged of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import pytest

from mock_engine import Engine, StepCost
from mock_engine.scheduler import Plan, Scheduler
from mock_engine.tests.serving import DEV, SHORT, listening, serving


async def test_a_pause_with_abort_ends_what_runs_counts_it_and_refuses_what_comes() -> None:
    async with serving(env=DEV) as client:
        task = await client.started({})
        assert await client.post("/pause?mode=abort") == {"status": "paused"}
        assert (await task)["choices"][0]["finish_reason"] == "abort"
        assert await client.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1
        status, body, _ = await client.ask("POST", "/v1/completions", SHORT)
        assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
        error, _ = await client.events(SHORT)
        assert (error["error"]["type"], error["error"]["code"]) == ("ServiceUnavailableError", 503)
        chat = {"messages": [{"role": "user", "content": "x"}]}
        error, _ = await client.events(chat, "/v1/chat/completions")
        assert (error["error"]["type"], error["error"]["code"]) == ("InternalServerError", 503)
        assert await client.get("/is_paused") == {"is_paused": True}
        assert await client.post("/resume") == {"status": "resumed"}
        assert await client.post("/v1/completions", SHORT)


async def test_a_pause_that_keeps_freezes_and_queues() -> None:
    async with serving(env=DEV) as client:
        await client.post("/pause?mode=keep")
        task = asyncio.create_task(client.post("/v1/completions", SHORT))
        await asyncio.sleep(0.05)
        assert not task.done()
        await client.post("/resume")
        assert (await task)["choices"][0]["finish_reason"] == "length"


async def test_an_asleep_engine_queues_silently_until_it_wakes() -> None:
    async with serving(env=DEV) as client:
        running = await client.started({})
        assert await client.post("/sleep?level=2") == {"status": "sleeping", "level": 2}
        assert (await running)["choices"][0]["finish_reason"] == "abort"
        assert await client.get("/is_sleeping") == {"is_sleeping": True}
        assert await client.metric('vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"') == 1
        task = asyncio.create_task(client.post("/v1/completions", SHORT))
        await asyncio.sleep(0.05)
        assert not task.done()
        assert await client.metric("vllm:num_requests_waiting{") == 0
        assert (await client.ask("GET", "/health"))[0] == 200
        assert await client.post("/wake_up") == {"status": "awake", "tags": None}
        await task


@pytest.mark.parametrize(("mode", "alive"), [("wait", 0), ("keep", 1), ("abort", 0)])
async def test_a_sleep_may_wait_for_what_runs_or_keep_it(mode: str, alive: int) -> None:
    async with serving(env=DEV) as client:
        running = await client.started({"max_tokens": 300})
        await client.post(f"/sleep?mode={mode}")
        assert len(client.replica.drivers[0].choices) == alive
        assert await client.get("/is_sleeping") == {"is_sleeping": True}
        await client.post("/wake_up")
        ended = "abort" if mode == "abort" else "length"
        assert (await running)["choices"][0]["finish_reason"] == ended


@pytest.mark.parametrize("path", ["/sleep?mode=never", "/sleep?level=3", "/pause?mode=never", "/sleep?level=x"])
async def test_a_switch_with_a_wrong_value_is_a_bad_request(path: str) -> None:
    async with serving(env=DEV) as client:
        status, body, _ = await client.ask("POST", path)
        assert (status, body["error"]["type"]) == (400, "Bad Request")
        assert body["error"]["param"].startswith("query.")


async def test_aborted_requests_end_with_an_empty_chunk_and_are_not_counted() -> None:
    async with serving(env=DEV) as client:
        first = await client.started({"request_id": "one"})
        second = asyncio.create_task(
            client.post("/v1/completions", {"prompt": "x", "max_tokens": 300, "request_id": "two"})
        )
        while len(client.replica.drivers[0].choices) < 2:
            await asyncio.sleep(0.002)
        assert await client.post("/abort_requests", {"request_ids": ["one"]}) == {"status": "aborted", "aborted": 1}
        assert (await first)["choices"][0]["finish_reason"] == "abort"
        assert (await second)["choices"][0]["finish_reason"] == "length"
        assert await client.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 0
        assert await client.post("/abort_requests", {}) == {"status": "aborted", "aborted": 0}


async def test_the_cache_is_reset_only_while_nothing_runs() -> None:
    async with serving(env=DEV) as client:
        task = await client.started({})
        assert await client.post("/reset_prefix_cache") == {"success": False}
        await client.post("/abort_requests", {})
        await task
        assert (await client.get("/mock/state"))["cached_blocks"] > 0
        assert await client.post("/reset_prefix_cache") == {"success": True}
        assert (await client.get("/mock/state"))["cached_blocks"] == 0


async def test_a_reset_that_does_not_wait_preempts_what_runs_and_every_answer_stays_whole() -> None:
    path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
    async with serving("--mock-speedup", "5", env=DEV) as client:
        ask = {"prompt": [5] * 40, "max_tokens": 150, "seed": 4, "return_token_ids": True}
        undisturbed = (await client.post("/v1/completions", ask))["choices"][0]["token_ids"]
        task = await client.started(ask)
        while client.replica.drivers[0].snapshot().used_blocks < 4:
            await asyncio.sleep(0.002)
        assert await client.post("/reset_prefix_cache") == {"success": False}
        assert await client.post(path) == {"success": True}
        assert (await task)["choices"][0]["token_ids"] == undisturbed
        assert await client.metric("vllm:num_preemptions_total{") == 1
        state = await client.get("/mock/state")
        assert (state["preemptions"], state["running"], state["used_blocks"]) == (1, 0, 0)
        assert (await client.ask("POST", "/reset_prefix_cache?reset_running_requests=maybe"))[0] == 400


async def test_queue_limits_answer_503_and_count_the_reason() -> None:
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    async with serving(*flags) as client:
        running = await client.started({"max_tokens": 3000})
        while client.replica.drivers[0].snapshot().running < 1:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)
        queued = asyncio.create_task(client.post("/v1/completions", SHORT))
        while len(client.replica.drivers[0].choices) < 2:
            await asyncio.sleep(0.002)
        status, body, _ = await client.ask("POST", "/v1/completions", {**SHORT, "stream": True})
        assert (status, body["error"]["type"]) == (503, "Service Unavailable")
        assert await client.metric('vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"') == 1
        running.cancel()
        await queued


async def test_a_client_that_leaves_frees_its_blocks_and_is_not_observed() -> None:
    async with serving() as client:
        for stream in (False, True):
            task = await client.started({"stream": stream})
            while not client.replica.drivers[0].snapshot().used_blocks:
                await asyncio.sleep(0.002)
            task.cancel()
            while client.replica.drivers[0].snapshot().used_blocks:
                await asyncio.sleep(0.002)
        assert await client.metric("vllm:request_success_total") == 0
        assert await client.metric("vllm:num_requests_running") == 0


async def test_logs_tell_every_request_and_the_load_over_time(tmp_path: Path) -> None:
    flags = ("--mock-log-dir", str(tmp_path), "--mock-name", "r7", "--mock-sample-ms", "100")
    async with serving(*flags, "--max-model-len", "128") as client:
        await client.post("/v1/completions", SHORT, **{"X-Request-Id": "one"})
        await client.ask("POST", "/v1/completions", {"prompt": [5] * 500, "max_tokens": 1}, **{"X-Request-Id": "two"})
        await asyncio.sleep(0.05)
    rows = [json.loads(line) for line in (tmp_path / "engine-r7.requests.jsonl").read_text().splitlines()]
    assert [(row["request_id"], row["finish"]) for row in rows] == [("one", "length"), ("two", "rejected")]
    done = rows[0]
    assert done["response_id"] == "cmpl-one"
    assert done["arrived_us"] <= done["admitted_us"] < done["first_token_us"] < done["last_token_us"]
    assert (done["prompt_tokens"], done["cached_tokens"], done["output_tokens"], done["preemptions"]) == (3, 0, 2, 0)
    samples = [json.loads(line) for line in (tmp_path / "engine-r7.fleet.jsonl").read_text().splitlines()]
    assert samples
    assert all(sample["t_us"] % 100_000 == 0 for sample in samples)
    assert {"running", "waiting", "used_blocks", "hit_tokens", "late_us_p99", "step_us_mean"} <= set(samples[0])


async def test_a_replica_whose_engine_failed_says_so_and_lets_nobody_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving() as client:
        whole = await client.started({})
        stream = asyncio.create_task(client.events({"prompt": "x", "max_tokens": 2000}))
        while len(client.replica.drivers[0].choices) < 2:
            await asyncio.sleep(0.002)

        def broken(now_us: int) -> None:
            raise RuntimeError("out of mockery")

        monkeypatch.setattr(client.replica.drivers[0].engine, "step", broken)
        *_, error, done = await stream
        assert (error["error"]["code"], done) == (500, "[DONE]")
        with pytest.raises(AssertionError, match="out of mockery"):
            await whole
        assert (await client.ask("GET", "/health"))[0] == 503
        assert "out of mockery" in capsys.readouterr().err
        for more in ({}, {"stream": True}):
            status, refused, _ = await client.ask("POST", "/v1/completions", {"prompt": "x", **more})
            assert (status, refused["error"]["type"]) == (500, "InternalServerError")
            assert "out of mockery" in refused["error"]["message"]


async def test_a_stuck_engine_is_dead_until_a_restart_and_one_line_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with listening(env=DEV) as client:
        (driver,) = client.replica.drivers
        driver.engine = Engine(
            client.replica.config, cost=StepCost(step_fixed_us=1e7), rng=Random(0), make_scheduler=Motionless
        )
        status, refused, _ = await client.ask("POST", "/v1/completions", {"prompt": [5] * 40, "max_tokens": 2})
        assert status == 500
        assert "no request got any further in 30.0 s" in refused["error"]["message"]
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert said[0].startswith("the engine is stuck: no request got any further in 30.0 s")
        assert "needs 3 KV cache blocks" in said[0]
        await client.post("/pause")
        await client.post("/resume")
        assert (await client.ask("GET", "/health"))[0] == 503
        await client.post("/mock/restart")
        assert (await client.ask("GET", "/health"))[0] == 200
        await client.post("/v1/completions", SHORT)


class Motionless(Scheduler):
    def schedule(self) -> Plan:
        return Plan()


async def test_a_preemption_is_counted_with_the_next_token_of_its_request() -> None:
    async with serving(env=DEV) as client:
        (driver,) = client.replica.drivers
        task = await client.started({"max_tokens": 400})
        gone = await client.started({"max_tokens": 400, "request_id": "gone"})
        while any(choice.count == 0 for choice in driver.choices) or len(driver.choices) < 2:
            await asyncio.sleep(0.002)
        await client.post("/pause?mode=keep")
        assert await client.post("/reset_prefix_cache?reset_running_requests=true") == {"success": True}
        assert driver.snapshot().preemptions == 2
        assert await client.metric("vllm:num_preemptions_total") == 0
        await client.post("/abort_requests", {"request_ids": ["gone"]})
        await gone
        await client.post("/resume")
        await task
        assert await client.metric("vllm:num_preemptions_total") == 1


async def test_lateness_is_measured_and_never_added_to_the_models_time() -> None:
    async with serving() as client:
        await client.post("/v1/completions", {"prompt": "x", "max_tokens": 50})
        driver = client.replica.drivers[0]
        snapshot = driver.snapshot()
        assert len(driver.late_us) == snapshot.steps == 50
        # The steps follow each other without a gap on the model's clock, whatever the wall did.
        text = await client.get("/metrics")
        decode = next(line for line in text.splitlines() if line.startswith("vllm:request_decode_time_seconds_sum"))
        inference = next(
            line for line in text.splitlines() if line.startswith("vllm:request_inference_time_seconds_sum")
        )
        prefill = next(line for line in text.splitlines() if line.startswith("vllm:request_prefill_time_seconds_sum"))
        decode_s, inference_s, prefill_s = (float(line.rpartition(" ")[2]) for line in (decode, inference, prefill))
        assert inference_s == pytest.approx(snapshot.busy_us / 1e6, abs=2e-6)
        assert decode_s + prefill_s == pytest.approx(inference_s)


async def test_a_client_that_leaves_before_the_engine_has_its_request_is_logged_as_an_abort(tmp_path: Path) -> None:
    async with serving("--mock-speedup", "0.02", "--mock-log-dir", str(tmp_path), "--mock-name", "r0") as client:
        task = asyncio.create_task(client.post("/v1/completions", SHORT, **{"X-Request-Id": "hasty"}))
        while not client.replica.in_flight:
            await asyncio.sleep(0.002)
        task.cancel()
        while client.replica.in_flight:
            await asyncio.sleep(0.002)
    (row,) = [json.loads(line) for line in (tmp_path / "engine-r0.requests.jsonl").read_text().splitlines()]
    assert (row["request_id"], row["finish"], row["admitted_us"]) == ("hasty", "abort", None)
    assert row["arrived_us"] > 0
