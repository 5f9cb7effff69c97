"""The part of the table of metrics that holds distributions of times: formulas in words, as the glossary shows them.

Taken over successes of the steady phase unless the formula says otherwise; S is the instant a request was sent, F its
first token, L its last token, n its output tokens. Words whose meaning differs between load tools are not used.
"""

from __future__ import annotations

from reports.metric import Metric


def _latency(name: str, title: str, formula: str, null_when: str, decimals: int = 1) -> Metric:
    return Metric(name, title, "ms", "lower", "distribution", formula, null_when, decimals)


LATENCY_METRICS = (
    _latency(
        "ttft_ms",
        "TTFT",
        "F - S: sent to first token. A role-only, usage or keep-alive chunk is no token, an empty-text "
        "token is (vLLM's rule)",
        "no success",
    ),
    _latency(
        "first_content_ms",
        "First content",
        "first token that is part of the answer itself - S, reasoning left out (aiperf's time to first output token)",
        "no answer with a token of its own, or the load generator does not tell",
    ),
    _latency(
        "ttst_ms",
        "Second token",
        "second token chunk - F: the hand-over from prefill to decode (as aiperf)",
        "no answer of two chunks",
    ),
    _latency(
        "tpot_ms",
        "TPOT",
        "(L - F) / (n - 1), immune to chunking (as vLLM); answers of one token have none",
        "no answer of two tokens",
        2,
    ),
    _latency(
        "token_gap_ms",
        "Token gap",
        "(L - F) / (n - tokens of the first chunk): mean time of a token after the first chunk, right also where "
        "several come at once (aiperf's inter token latency)",
        "tokens of first chunks are unknown, or all came at once",
        2,
    ),
    _latency(
        "inter_chunk_latency_ms",
        "Chunk gap",
        "gaps between token chunks as they arrived, pooled over requests; chunks are not tokens",
        "gaps were not recorded",
        2,
    ),
    _latency("ntpot_ms", "Normalized TPOT", "(L - S) / n: TTFT shared out over the tokens", "no success", 2),
    _latency("e2e_ms", "End to end", "L - S; a trailing usage chunk is not a user's latency", "no success"),
    _latency(
        "session_e2e_ms",
        "Session end to end",
        "L of a session's last turn - S of its first, think time included; for a rollout its whole time. "
        "Only sessions without a failed turn that end in the steady phase",
        "no whole session",
    ),
    _latency(
        "step_makespan_ms",
        "Step makespan",
        "over a rollout step, the last L - the first S: its slowest member sets it. Only steps without a failed "
        "turn that end in the steady phase",
        "no rollout steps",
    ),
    _latency(
        "group_completion_ms",
        "Group completion",
        "over a group of rollouts (samples of one prompt) of a step, the last L - the first S: its slowest member sets "
        "it. Only groups without a failed turn that end in the steady phase",
        "no rollout steps, or rollouts have no group",
    ),
    _latency(
        "queue_ms",
        "Engine queue",
        "admitted by the engine - routed (sent, where the router does not say): the wait before the first "
        "scheduled step",
        "the engine does not tell",
    ),
    _latency(
        "routing_ms",
        "Routing",
        "decision made - S: receipt, tokenisation and choice inside the router",
        "the router does not tell, or a simulation",
        2,
    ),
    _latency(
        "client_wait_ms",
        "Client wait",
        "S - the instant from which it could have been sent, over every steady request that was: under a cap on "
        "requests the wait for a free place, which is in no TTFT; the load generator's own delay is in it",
        "the load generator does not tell",
        2,
    ),
    _latency(
        "ttft_with_wait_ms",
        "TTFT with client wait",
        "F - the instant from which it could have been sent: what whoever waits in the client's queue sees",
        "the load generator does not tell",
    ),
    _latency(
        "sched_lag_ms",
        "Send lag",
        "S - scheduled, over every steady request that was sent: the load generator's own delay",
        "nothing was scheduled",
        2,
    ),
    _latency(
        "ttft_from_schedule_ms",
        "TTFT from schedule",
        "F - scheduled: TTFT corrected for coordinated omission",
        "nothing was scheduled",
    ),
    _latency("e2e_from_schedule_ms", "End to end from schedule", "L - scheduled", "nothing was scheduled"),
)
