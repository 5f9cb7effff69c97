"""What a comparison says in words: who won what, by how much, why, and what to beware of; all of it from the figures.

A cause is a figure that may explain a win. Its strength grows with how far the winner and the runner-up are apart in
it, and is negative where the figure speaks against the winner, which is then said too. A difference that is too close
to call is no cause beyond doubt and is said to be none. With no cause beyond its threshold the sentence says that,
instead of inventing one. Who is named ahead and lost more requests than another is told to have in the same sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.balance import DEGENERATE_SHARE
from reports.compare import CONFIDENCE, EQUAL, LOST_MORE, NOT_JUDGED, TOO_CLOSE, Call, lost_share, repeats_behind
from reports.display import join, label, number, percent, phrase, with_unit
from reports.metrics_table import direction_of, lookup, metric_of
from reports.unfinished import account, lost

Metrics = Mapping[str, Any]

# The figures that a verdict is about, most telling first; causes such as the hit rate are not among them.
ROLLOUT_OUTCOMES = (
    "session_e2e_ms.p99",
    "step_makespan_ms.p50",
    "output_tokens_per_s",
    "ttft_ms.p99",
    "ttft_ms.p50",
    "tpot_ms.p50",
    "tpot_ms.p99",
)
OUTCOMES = ("ttft_ms.p99", "ttft_ms.p50", "session_e2e_ms.p99", "tpot_ms.p50", "tpot_ms.p99", "output_tokens_per_s")
CAUSES_SHOWN = 2
PHANTOM_POINTS = 5.0
UNEVEN_MAX_OVER_MEAN = 2.0
DISTINCT_SHARE_MIN = 0.10  # of the requests; below, the load is mostly the same questions again
REPETITIVE_FROM = 50  # requests
FAR_APART = 2.0  # times; figures so far apart and too close to call are explained
REPEATS_ENOUGH = 5  # fewer hardly tell how much repeats differ
KEPT_MIN = 0.9  # of what was believed, found by requests that were admitted at once: the index was right
GONE_MIN = 0.2  # by how much less of it those found that waited: it went in the meantime


@dataclass(frozen=True, slots=True)
class Cause:
    """`scale` is the difference that counts as 1, `least` the difference below which nothing is said."""

    address: str
    scale: float
    least: float
    helps: str
    hurts: str
    higher_helps: bool = False
    relative: bool = False  # difference as a share of the larger value
    floor: float = 0.0  # values that both lie below it are alike

    def strength(self, winner: Metrics, other: Metrics) -> float:
        a, b = lookup(winner, self.address), lookup(other, self.address)
        if a is None or b is None or max(abs(a), abs(b)) <= self.floor:
            return 0.0
        gap = (a - b) if self.higher_helps else (b - a)
        if self.relative:
            gap /= max(abs(a), abs(b))
        return gap / self.scale if abs(gap) >= self.least else 0.0

    def text(self, winner: Metrics, other: Metrics, helps: bool) -> str:
        words = self.helps if helps else self.hurts
        a, b = (with_unit(self.address, lookup(metrics, self.address)) for metrics in (winner, other))
        return words.format(a=a, b=b)


CAUSES = (
    Cause(
        "hit_rate",
        scale=0.05,
        least=0.02,
        higher_helps=True,
        helps="{a} of its prompt tokens were cached against {b}",
        hurts="its hit rate is lower ({a} against {b})",
    ),
    Cause(
        "queue_ms.mean",
        scale=0.4,
        least=0.2,
        helps="its requests waited {a} in the engines' queues on average against {b}",
        hurts="its requests waited longer in the engines' queues ({a} against {b} on average)",
        relative=True,
        floor=1.0,
    ),
    Cause(
        "load_cv.decode_blocks",
        scale=0.1,
        least=0.05,
        helps="its replicas were loaded more evenly (imbalance of decode blocks {a} against {b})",
        hurts="its replicas were loaded less evenly (imbalance of decode blocks {a} against {b})",
    ),
    Cause(
        "preemptions",
        scale=0.5,
        least=0.2,
        helps="its engines preempted {a} times against {b}",
        hurts="its engines preempted more often ({a} times against {b})",
        relative=True,
        floor=5,
    ),
    Cause(
        "placement.max_share",
        scale=0.15,
        least=0.10,
        helps="its busiest replica took {a} of the requests against {b}",
        hurts="its busiest replica took more of the requests ({a} against {b})",
    ),
    Cause(
        "phantom_hit_points",
        scale=5.0,
        least=3.0,
        helps="what it believed of the caches and what was served were {a} of hit rate apart against {b}",
        hurts="what it believed of the caches was further from what was served ({a} of hit rate against {b})",
    ),
    Cause(
        "routing_ms.mean",
        scale=1.0,
        least=0.5,
        helps="choosing a replica took {a} against {b}",
        hurts="choosing a replica took longer ({a} against {b})",
        relative=True,
        floor=5.0,
    ),
)


def sentences(routers: Mapping[str, Metrics], calls: Mapping[str, Call]) -> list[str]:
    """First the verdict, then the reason."""
    if len(routers) < 2:
        return ["Only one router ran: there is nothing to compare."]
    outcomes = ROLLOUT_OUTCOMES if has_rollouts(routers) else OUTCOMES
    judged = [calls[address] for address in outcomes if address in calls and calls[address].best is not None]
    answered = [name for name, metrics in routers.items() if metrics["requests_per_s"]]
    if len(answered) >= 2 and not judged and any(call.basis == EQUAL for call in calls.values()):
        return ["The routers did the same: every figure that counts is equal."]
    if not judged:
        return ["Fewer than two routers have figures: there is nothing to compare."]
    unsure = [call for call in judged if not call.winner and call.basis != LOST_MORE]
    if len(unsure) == len(judged):
        return [_no_winner(routers, judged[0]), *_unsure(routers, unsure[1:])]
    won = next((call for call in judged if call.winner), None)
    reasons = [_reason(routers, won.winner, won.runner_up, calls)] if won and won.winner and won.runner_up else []
    return [_verdict(routers, judged), *reasons, *_unsure(routers, unsure)]


def has_rollouts(routers: Mapping[str, Metrics]) -> bool:
    return any(metrics.get("step_makespan_ms") for metrics in routers.values())


def _no_winner(routers: Mapping[str, Metrics], call: Call) -> str:
    best, second = call.best or "", call.runner_up or ""
    behind = [
        name for name in routers if name not in call.contenders and lookup(routers[name], call.address) is not None
    ]
    text = (
        f"{TOO_CLOSE.capitalize()}: no router is better beyond doubt. At {phrase(call.address)}, {best} has "
        f"{with_unit(call.address, lookup(routers[best], call.address))} and {second} "
        f"{with_unit(call.address, lookup(routers[second], call.address))}"
    )
    after = f" Behind {best} beyond doubt: {join(behind)}." if behind else ""
    if call.interval is None:
        return f"{text}, from too few sessions to tell.{after}"
    return f"{text}; {_room(call, best)}.{after}"


def _room(call: Call, best: str) -> str:
    """Between which values the difference lies, as gains and losses of the router that is ahead."""
    low, high = call.interval or (0.0, 0.0)
    better, worse = (-low, high) if direction_of(call.address) == "lower" else (high, -low)
    most = with_unit(call.address, better)
    if worse > 0:
        return f"{best} may be anything from {most} better to {with_unit(call.address, worse)} worse"
    return f"{best} is better by {with_unit(call.address, -worse)} to {most}, which is of no use to anybody"


def _verdict(routers: Mapping[str, Metrics], judged: Sequence[Call]) -> str:
    parts = []
    open_calls = [phrase(call.address) for call in judged if not call.winner and call.basis != LOST_MORE]
    for name in dict.fromkeys(call.winner for call in judged if call.winner):
        wins = [call for call in judged if call.winner == name]
        first = wins[0]
        mine, theirs = (
            with_unit(first.address, lookup(routers[who or ""], first.address)) for who in (name, first.runner_up)
        )
        most = f"{phrase(first.address)} ({mine} against {theirs} of {first.runner_up}, {_gain(routers, first)})"
        wins_all = join([most, *(phrase(call.address) for call in wins[1:])])
        cost = _cost(routers, name)
        parts.append(f"{name} wins {wins_all}{f', though it lost {cost}' if cost else ''}")
    for name in dict.fromkeys(call.best for call in judged if call.basis == LOST_MORE and call.best):
        ahead = join([phrase(call.address) for call in judged if call.best == name and call.basis == LOST_MORE])
        cost = _cost(routers, name)
        parts.append(f"{name} is ahead in {ahead}, but lost {cost}: what is lost is in no time, so it wins none")
    text = "; ".join(parts)
    if open_calls:
        text += f"; {join(open_calls)} {'is' if len(open_calls) == 1 else 'are'} {TOO_CLOSE}"
    return text + "."


def _cost(routers: Mapping[str, Metrics], name: str) -> str:
    """How many requests a router lost and how few another; empty where no other lost a smaller share."""
    shares = {other: lost_share(metrics) for other, metrics in routers.items() if metrics["requests"]}
    if name not in shares or shares[name] <= min(shares.values()):
        return ""
    fewest = min(shares, key=lambda other: (shares[other], other))
    mine, theirs = (f"{lost(routers[who]):,} of {routers[who]['requests']:,}" for who in (name, fewest))
    return f"{mine} requests and {fewest} {theirs}"


def _unsure(routers: Mapping[str, Metrics], calls: Sequence[Call]) -> list[str]:
    """Why figures that look far apart, or looked so in one run, are too close to call."""
    told = []
    apart = {call: ratio for call in calls if call.interval and (ratio := _ratio(routers, call)) >= FAR_APART}
    if apart:
        call = max(apart, key=lambda call: apart[call])
        mine, theirs = (with_unit(call.address, lookup(routers[who or ""], call.address)) for who in _two(call))
        jumps = metric_of(call.address).kind == "distribution"
        told.append(
            f"{label(call.address)} is {TOO_CLOSE} although {call.best} has {mine} and {call.runner_up} {theirs}: "
            f"with other sessions {_room(call, call.best or '')}"
            f"{', as a percentile jumps where requests are either fast or slow' if jumps else ''}."
        )
    few = {count for call in calls if (count := repeats_behind(call)) is not None and count < REPEATS_ENOUGH}
    if few:
        told.append(
            f"Intervals come from the spread between {min(few)} repeats, and so few hardly tell it: they are wide, and "
            f"one run alone may name more winners. Take {REPEATS_ENOUGH} repeats or more."
        )
    return told


def _two(call: Call) -> tuple[str | None, str | None]:
    return call.best, call.runner_up


def _ratio(routers: Mapping[str, Metrics], call: Call) -> float:
    """How many times the smaller of best and runner-up the larger is."""
    values = [abs(value) for who in _two(call) if (value := lookup(routers[who or ""], call.address)) is not None]
    return max(values) / min(values) if len(values) == 2 and min(values) > 0 else 1.0


def _gain(routers: Mapping[str, Metrics], call: Call) -> str:
    """By how much the winner is better, and how sure that is, as shares of the runner-up's value."""
    text = f"{percent(call.gain)} better"
    worse = lookup(routers[call.runner_up or ""], call.address)
    if call.interval is None or not worse:
        return text
    # The far end of an interval of a difference may lie where no value can; the near end is what is claimed.
    least = min(abs(bound / worse) for bound in call.interval)
    return f"{text}, at least {percent(least)} at {100 * CONFIDENCE:.0f} % confidence"


def _reason(routers: Mapping[str, Metrics], winner: str, other: str, calls: Mapping[str, Call]) -> str:
    mine, theirs = routers[winner], routers[other]
    ranked = sorted(((cause.strength(mine, theirs), cause) for cause in CAUSES), key=lambda found: -abs(found[0]))
    sure = [(strength, cause) for strength, cause in ranked if not _too_close(calls.get(cause.address), winner, other)]
    helping = [cause.text(mine, theirs, True) for strength, cause in sure if strength > 0][:CAUSES_SHOWN]
    hurting = [cause.text(mine, theirs, False) for strength, cause in sure if strength < 0][:1]
    although = f", although {hurting[0]}" if hurting else ""
    if helping:
        return f"Why {winner} beats {other}: {join(helping)}{although}."
    maybe = [cause.text(mine, theirs, True) for strength, cause in ranked if strength > 0][:1]
    if maybe:
        return f"Why {winner} beats {other} is not certain: {maybe[0]}, which by itself is {TOO_CLOSE}{although}."
    return (
        f"Why {winner} beats {other} is not in the figures: hit rate, queues, balance and preemptions do not "
        f"favour it{although}."
    )


def _too_close(found: Call | None, one: str, other: str) -> bool:
    """Whether two routers cannot be told apart in a figure; what nobody judged is taken as it stands."""
    return found is not None and found.basis != NOT_JUDGED and {one, other} <= set(found.contenders)


@dataclass(frozen=True, slots=True)
class Flag:
    kind: str
    router: str
    text: str


def flags(routers: Mapping[str, Metrics]) -> list[Flag]:
    """What a reader must know before trusting or copying a result."""
    return [
        Flag(kind, name, f"{name}: {text}")
        for name, metrics in routers.items()
        for kind, rule in FLAG_RULES.items()
        if (text := rule(metrics))
    ]


def told_flags(routers: Mapping[str, Metrics]) -> list[Flag]:
    """The same, with what is true of every router in the same words told once."""
    found = flags(routers)
    own = {flag: flag.text.removeprefix(f"{flag.router}: ") for flag in found}
    counts = Counter((flag.kind, own[flag]) for flag in found)
    told: dict[tuple[str, str], Flag] = {}
    for flag in found:
        shared = len(routers) > 1 and counts[flag.kind, own[flag]] == len(routers)
        key = (flag.kind, own[flag] if shared else flag.text)
        told.setdefault(key, Flag(flag.kind, "", f"every router: {own[flag]}") if shared else flag)
    return list(told.values())


def _degenerate(metrics: Metrics) -> str | None:
    counts, share = metrics["placement"], lookup(metrics, "placement.max_share")
    if not counts or len(counts) < 2 or share is None or share <= DEGENERATE_SHARE:
        return None
    busiest = max(counts, key=lambda name: counts[name])
    return (
        f"degenerate placement: {busiest} got {percent(share)} of the requests while {len(counts) - 1} others stood by"
    )


def _uneven(metrics: Metrics) -> str | None:
    counts, share, held = metrics["placement"], lookup(metrics, "placement.max_share"), metrics["in_flight_mean"]
    if not counts or share is None or held is None or share > DEGENERATE_SHARE or held >= len(counts):
        return None
    if sum(counts.values()) < 4 * len(counts) or share * len(counts) <= UNEVEN_MAX_OVER_MEAN:
        return None
    return (
        f"uneven at low load: the busiest replica got {share * len(counts):.1f} times the mean with {held:.1f} "
        "requests in flight"
    )


def _preempted(metrics: Metrics) -> str | None:
    count = metrics["preemptions"]
    if not count:
        return None
    often = "once" if count == 1 else f"{count:,} times"
    return f"preempted: the engines ran out of blocks {often}, so part of the work was done twice"


def _warm(metrics: Metrics) -> str | None:
    rate, ceiling = metrics["hit_rate"], metrics["hit_rate_ceiling"]
    if rate is None or ceiling is None or rate <= ceiling + 0.001:
        return None
    return (
        f"warm start: {percent(rate)} of prompt tokens hit, more than the {percent(ceiling)} that a cold cache "
        "of any size could give"
    )


def _phantom(metrics: Metrics) -> str | None:
    points = metrics["phantom_hit_points"]
    if points is None or abs(points) <= PHANTOM_POINTS:
        return None
    stale, unseen = metrics["stale_placements"] or 0, metrics["unseen_hits"] or 0
    if points > 0:
        how = f"too optimistic: {stale:,} requests expected a hit and found nothing" if stale else "too optimistic"
        how += _gone(metrics)
    else:
        how = f"too pessimistic: {unseen:,} requests hit though none was expected" if unseen else "too pessimistic"
    return f"its belief about the caches was off by {number(points, 1)} points of hit rate ({how})"


def _gone(metrics: Metrics) -> str:
    """Whether what was believed was already gone when the router chose, or went while the request waited; nothing where
    the figures do not tell the two apart."""
    at_once, after = metrics["belief_kept_at_once"], metrics["belief_kept_after_wait"]
    if at_once is None:
        return ""
    found = f"requests admitted at once found {percent(at_once)} of what was believed"
    if at_once < KEPT_MIN:
        return f"; {found}, so the belief was wrong when the router chose"
    if after is None or after > at_once - GONE_MIN:
        return ""
    waits = [with_unit("misbelieved_queue_ms", metrics[name]) for name in ("misbelieved_queue_ms", "believed_queue_ms")]
    return (
        f"; {found}, and those that found less waited {waits[0]} in the engines' queues on average, others {waits[1]}: "
        "it was evicted before the engine came to them"
    )


def _repetitive(metrics: Metrics) -> str | None:
    distinct, answered = metrics["distinct_prompt_share"], metrics["requests"]
    if distinct is None or distinct >= DISTINCT_SHARE_MIN or answered < REPETITIVE_FROM:
        return None
    return (
        f"few prompts: only {percent(distinct)} of the prompts were different, so hit rate and throughput say little "
        "of traffic that asks different things"
    )


def _failing(metrics: Metrics) -> str | None:
    return f"{account(metrics)}; they are in no latency figure" if lost(metrics) else None


FLAG_RULES: dict[str, Callable[[Metrics], str | None]] = {
    "degenerate-placement": _degenerate,
    "uneven-placement": _uneven,
    "preempted": _preempted,
    "warm-start": _warm,
    "phantom-hits": _phantom,
    "few-prompts": _repetitive,
    "failures": _failing,
}
