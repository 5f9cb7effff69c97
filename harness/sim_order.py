"""What happens at one instant of the simulation happens in the order of these numbers; each says why."""

from __future__ import annotations

KV = 0
"""Cache events first: an engine publishes a step's events before its tokens leave."""
TOKEN = 1
"""Then tokens and ends: whoever asks at this instant already sees them."""
CHURN = 2
"""Then replicas that come and go: what ended at this instant has ended, who asks next meets the new fleet."""
POLL = 3
"""Then what a router reads of the engines' gauges."""
ENTER = 4
"""Then requests that reach an engine's queue: a step that starts at this instant has them."""
ARRIVE = 5
"""Then new turns, which are routed on everything above."""
SAMPLE = 6
"""Samples last: they show the instant as it was left."""
