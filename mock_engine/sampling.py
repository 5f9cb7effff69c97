"""What of a request decides the length and the end of its answers, checked as vLLM's sampling parameters are.

The values are also shown by the render routes, where they stand as the real server resolves them: greedy sampling puts
top_p, top_k and min_p back to their defaults, a tiny temperature is lifted to the smallest that is safe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mock_engine.protocol import bad_request

N_MAX = 16_384
MAX_LOGPROBS = 20
TEMPERATURE_GREEDY = 1e-5  # below this, sampling is greedy
TEMPERATURE_MIN = 0.01  # what is not 0 is at least this


@dataclass(frozen=True, slots=True)
class Sampling:
    """What of a request decides the length and the end of its answers."""

    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # candidates a token of the answer
    prompt_logprobs: int | None = None  # and a token of the prompt; such a request does not read the cache
    rendered: dict[str, Any] = field(default_factory=dict)  # the values that /render shows, in its order


_DEFAULTS: dict[str, float] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}


def sampling(fields: Mapping[str, Any], max_tokens: int) -> Sampling:
    """The checked sampling values; `max_tokens` is already bounded by the context."""
    n = 1 if fields["n"] is None else fields["n"]
    _check_logit_bias(fields["logit_bias"])
    number = {key: default if fields[key] is None else fields[key] for key, default in _DEFAULTS.items()}
    stop = fields["stop"]
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    _check_ranges(n, number, max_tokens, fields["min_tokens"])
    if any(not text for text in stops):
        raise bad_request("stop cannot contain an empty string.")
    if any(not text for text in fields["bad_words"]):
        raise bad_request(f"bad_words cannot contain an empty string. Got bad_words={fields['bad_words']}")
    if number["temperature"] < TEMPERATURE_GREEDY:
        if n > 1:
            raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
        number.update(top_p=_DEFAULTS["top_p"], top_k=_DEFAULTS["top_k"], min_p=_DEFAULTS["min_p"])
    elif number["temperature"] < TEMPERATURE_MIN:
        number["temperature"] = TEMPERATURE_MIN
    is_chat = "top_logprobs" in fields
    logprobs = fields["top_logprobs" if is_chat else "logprobs"]
    prompt_logprobs = fields["prompt_logprobs"]
    if prompt_logprobs is None and fields["echo"]:
        prompt_logprobs = logprobs
    if is_chat and not fields["logprobs"]:
        logprobs = None
    seed = None if fields["seed"] == -1 else fields["seed"]
    stop_token_ids = tuple(dict.fromkeys(fields["stop_token_ids"] or ()))
    return Sampling(
        max_tokens=max_tokens,
        n=n,
        min_tokens=fields["min_tokens"],
        temperature=number["temperature"],
        seed=seed,
        stop=stops,
        stop_token_ids=stop_token_ids,
        ignore_eos=fields["ignore_eos"],
        include_stop=fields["include_stop_str_in_output"],
        skip_special_tokens=fields["skip_special_tokens"],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        rendered=_rendered(fields, number, n, seed, stops, stop_token_ids, max_tokens, logprobs, prompt_logprobs),
    )


def _check_logit_bias(bias: Mapping[str, float] | None) -> None:
    wrong = [key for key in bias or () if not _is_whole(key)]
    if wrong:
        raise bad_request(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong!r}", "logit_bias", wrong
        )


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def check_logprobs(how: Sampling, vocab_size: int) -> None:
    """The engine's own check, which a stream learns of only after its headers; -1 asks for the whole vocabulary."""
    for kind, param, asked in (
        ("sample", "logprobs", how.logprobs),
        ("prompt", "prompt_logprobs", how.prompt_logprobs),
    ):
        wanted = vocab_size if asked == -1 else asked
        if wanted is not None and wanted > MAX_LOGPROBS:
            raise bad_request(
                f"Requested {kind} logprobs of {wanted}, which is greater than max allowed: {MAX_LOGPROBS}",
                param,
                wanted,
            )


def _check_ranges(n: int, number: Mapping[str, float], max_tokens: int, min_tokens: int) -> None:
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > N_MAX:
        raise bad_request(
            f"n must be at most {N_MAX}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment "
            f"variable."
        )
    for key in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= number[key] <= 2.0:
            raise bad_request(f"{key} must be in [-2, 2], got {number[key]}.")
    if not math.isfinite(number["repetition_penalty"]):
        raise bad_request(f"repetition_penalty must be a finite number, got {number['repetition_penalty']}.")
    if number["repetition_penalty"] <= 0.0:
        raise bad_request(f"repetition_penalty must be greater than zero, got {number['repetition_penalty']}.")
    temperature, top_p = number["temperature"], number["top_p"]
    if not math.isfinite(temperature):
        raise bad_request(f"temperature must be a finite number, got {temperature}.", "temperature", temperature)
    if temperature < 0.0:
        raise bad_request(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if temperature > 2.0:
        raise bad_request(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    if not 0.0 < top_p <= 1.0:
        raise bad_request(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if number["top_k"] < -1:
        raise bad_request(f"top_k must be 0 (disable), or at least 1, got {number['top_k']}.")
    if not 0.0 <= number["min_p"] <= 1.0:
        raise bad_request(f"min_p must be in [0, 1], got {number['min_p']}.")
    if max_tokens < 1:
        raise bad_request(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")


def _rendered(
    fields: Mapping[str, Any],
    number: Mapping[str, float],
    n: int,
    seed: int | None,
    stops: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> dict[str, Any]:
    """`sampling_params` of the render routes: keys at their default are left out, but for those set on every call."""
    shown: dict[str, Any] = {
        "n": n if n != 1 else None,
        "presence_penalty": number["presence_penalty"],
        "frequency_penalty": number["frequency_penalty"],
        "repetition_penalty": number["repetition_penalty"],
        "temperature": number["temperature"],
        "top_p": number["top_p"],
        "top_k": number["top_k"] or None,
        "min_p": number["min_p"],
        "seed": seed,
        "stop": list(stops),
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": fields["ignore_eos"] or None,
        "max_tokens": max_tokens,
        "min_tokens": fields["min_tokens"] or None,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "skip_special_tokens": None if fields["skip_special_tokens"] else False,
        "include_stop_str_in_output": fields["include_stop_str_in_output"] or None,
        "output_kind": 1 if fields["stream"] else 2,
        "stream_interval": fields["stream_interval"],
        "skip_clone": True,
        "bad_words": list(dict.fromkeys(fields["bad_words"])),
        "skip_reading_prefix_cache": prompt_logprobs is not None,
    }
    return {key: value for key, value in shown.items() if value is not None}
