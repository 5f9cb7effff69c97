"""What prefix-aware routing is worth before one builds it: an estimate of capacity gained, and a verdict in words.

The formula is prefill_fraction x (achievable - baseline) x shared_fraction: the share of GPU time that is prefill, how
many more requests find their prefix, and how much of such a prompt the prefix is. It is an upper bound for an idle
cache: eviction and load balance take from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from workloads.limits import share

WORTH_IT = 0.05
"""From 5 % more capacity on. The examples this was set by: 19 % and 22 % are called worth it, 3.6 % and 1.2 % not."""


def value_estimate(prefill_fraction: float, achievable: float, baseline: float, shared_fraction: float) -> float:
    """Capacity gained as a share, from 0; all four are shares from 0 to 1. Where the baseline is no worse, 0."""
    named = {
        "prefill_fraction": prefill_fraction,
        "achievable": achievable,
        "baseline": baseline,
        "shared_fraction": shared_fraction,
    }
    for name, value in named.items():
        share(name, value)
    return prefill_fraction * max(0.0, achievable - baseline) * shared_fraction


@dataclass(frozen=True, slots=True)
class Verdict:
    """Worth building, and why or why not."""

    worth_it: bool
    value: float
    """`value_estimate` of the four shares below."""
    text: str
    prefill_fraction: float
    achievable: float
    baseline: float
    shared_fraction: float


def verdict(
    *,
    replicas: int,
    prefill_fraction: float,
    achievable: float,
    baseline: float,
    shared_fraction: float,
    sharing: float,
    min_prefix_tokens: int,
    prompt_tokens_median: float,
    turns_a_session: float,
) -> Verdict:
    """`sharing` is the share of requests with a common prefix of `min_prefix_tokens`, `turns_a_session` the mean; the
    rest as `value_estimate`. Short prompts are not worth it whatever the formula says."""
    value = value_estimate(prefill_fraction, achievable, baseline, shared_fraction)
    worth_it = value >= WORTH_IT and prompt_tokens_median >= min_prefix_tokens
    text = (
        f"{'Worth it' if worth_it else 'Not worth it'}: about {value:.1%} of capacity on {replicas} "
        f"replica{'s' if replicas != 1 else ''}, if prefill is {prefill_fraction:.0%} of the time. {sharing:.0%} of "
        f"requests begin with at least {min_prefix_tokens} tokens of a recent one; of all prompt tokens, random "
        f"placement finds {baseline * shared_fraction:.0%} in the cache and placement by prefix up to "
        f"{achievable * shared_fraction:.0%}."
    )
    if worth_it:
        text += " " + _what_to_try(turns_a_session)
    else:
        gain = achievable - baseline
        text += " " + _why_not(replicas, prefill_fraction, sharing, min_prefix_tokens, prompt_tokens_median, gain)
    return Verdict(worth_it, value, text, prefill_fraction, achievable, baseline, shared_fraction)


def _what_to_try(turns_a_session: float) -> str:
    """What sessions of one turn share they share with other sessions, which affinity to a session scatters."""
    if turns_a_session > 1:
        return "Try session affinity first, then routing on cache contents."
    return (
        "Session affinity has nothing to hold on to, because no session has a second turn: try routing by prefix, "
        "first by a hash of it, then on cache contents."
    )


def _why_not(replicas: int, prefill: float, sharing: float, min_prefix: int, median: float, gain: float) -> str:
    """The reason that weighs most."""
    if replicas == 1:
        return "With one replica there is nothing to route."
    if median < min_prefix:
        return f"Half of the prompts are shorter than {min_prefix} tokens: steering them costs more than it saves."
    if sharing < 0.1:
        return "Hardly any prompt begins like another one."
    if prefill < 0.1:
        return f"Only {prefill:.0%} of the time is prefill: most of the work is decoding, which no cache saves."
    if gain < 0.25:
        return f"Random placement already finds most of it with {replicas} replicas."
    return "The parts that requests share are too small beside the rest."
