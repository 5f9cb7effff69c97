"""Clients and load generators that people point at vLLM, pointed at a replica of ours and at routers in front."""

import asyncio
import json
import subprocess

import aiohttp
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harness.peers import PEERS
from harness.tests.peers.live import MODEL, fleet, program, require, token_ids

pytestmark = pytest.mark.peers

REQUESTS = 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder that transformers loads as a tokenizer, made here, so that no hub is asked."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["one load generator after the other asks one replica after the other " * 3],
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("router", [None, *PEERS])
def test_the_openai_client_works_with_a_replica_and_through_every_router(tmp_path, router):
    openai = pytest.importorskip("openai", reason="pip install openai")
    if router is not None:
        require(router)
    with fleet(tmp_path, replicas=1 if router is None else 2) as world:
        if router is not None:
            world.start_peer(router)
        with openai.OpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
            said = client.completions.create(model=MODEL, prompt="hello there", max_tokens=4, seed=1)
            assert said.choices[0].finish_reason == "length"
            assert said.usage.completion_tokens == 4
            messages = [{"role": "user", "content": "hello there"}]
            chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, seed=1)
            stream = client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=4,
                seed=1,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = list(stream)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == chat.choices[0].message.content
            assert chunks[-1].usage.completion_tokens == 4
            if router != "sglang-router":
                ids = client.completions.create(model=MODEL, prompt=token_ids(1, 40), max_tokens=2)
                assert ids.usage.prompt_tokens == 40


def test_aiperf_runs_without_an_error(tmp_path, tokenizer):
    aiperf = program("aiperf", "aiperf==0.13.0")
    with fleet(tmp_path, replicas=1) as world:
        out = tmp_path / "aiperf"
        _run(
            tmp_path,
            *(aiperf, "profile", "--model", MODEL, "--url", world.url, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", str(tokenizer), "--concurrency", "4", "--request-count", str(REQUESTS)),
            *("--isl", "120", "--osl", "8", "--extra-inputs", "ignore_eos:true", "--use-server-token-count"),
            *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", str(out)),
        )
        result = json.loads((out / "profile_export_aiperf.json").read_text())
        assert result["request_count"]["avg"] == REQUESTS
        assert result["request_error_rate"]["avg"] == 0
        assert not result["error_summary"]
        assert result["total_usage_completion_tokens"]["avg"] == 8 * REQUESTS
        assert result["time_to_first_token"]["avg"] > 0


def test_guidellm_runs_without_an_error(tmp_path, tokenizer):
    guidellm = program("guidellm", "torch==2.13.0 guidellm==0.8.1")
    with fleet(tmp_path, replicas=1) as world:
        out = tmp_path / "guidellm.json"
        _run(
            tmp_path,
            *(guidellm, "run", "--backend", f"kind=openai_http,target={world.url},model={MODEL}"),
            *("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
            *("--data", "kind=synthetic_text,prompt_tokens=120,output_tokens=8"),
            *("--output", f"kind=json,path={out}", "--disable-progress"),
        )
        requests = json.loads(out.read_text())["benchmarks"][0]["requests"]
        assert (len(requests["successful"]), len(requests["errored"]), len(requests["incomplete"])) == (REQUESTS, 0, 0)


@pytest.mark.parametrize("router", [None, *PEERS])
def test_requests_as_vllm_bench_serve_makes_them_are_answered_in_full(tmp_path, router):
    """The body and headers of its `openai` backend (text), counted as it counts: a chunk with text is a token."""
    if router is not None:
        require(router)
    with fleet(tmp_path, replicas=1 if router is None else 2) as world:
        if router is not None:
            world.start_peer(router)

        async def bench():
            async with aiohttp.ClientSession() as session:
                return await asyncio.gather(*(one(session, k) for k in range(8)))

        async def one(session, k):
            body = {
                "model": MODEL,
                "prompt": f"request {k} of a benchmark " * 10,
                "repetition_penalty": 1.0,
                "temperature": 0.0,
                "max_tokens": 16,
                "logprobs": None,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            }
            headers = {"Authorization": "Bearer none", "x-request-id": f"bench-{k}"}
            chunks, usage = 0, None
            async with session.post(f"{world.url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        data = json.loads(line[6:])
                        chunks += bool(data.get("choices"))
                        usage = data.get("usage") or usage
            return chunks, usage

        for chunks, usage in asyncio.run(bench()):
            assert chunks >= 1
            assert usage["completion_tokens"] == 16


def _run(folder, *command):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
