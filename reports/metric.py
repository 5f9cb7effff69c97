"""What one metric is: name, unit, direction, formula, when it is null, and the addresses of its numbers.

A distribution has the same statistics whatever it is of, so that a rule, a table or another program can rely on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["lower", "higher", "none"]
Kind = Literal["distribution", "number", "mapping"]

PERCENTILES = (50, 90, 95, 99)
DISTRIBUTION_KEYS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES), "max", "count")


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    title: str
    unit: str  # ms, share (0..1, shown as percent), points, 1/s, tokens/s, replica-s, or what is counted
    direction: Direction  # which way is better; none: neither is
    kind: Kind
    formula: str
    null_when: str
    decimals: int = 1
    keys: tuple[str, ...] = ()  # parts of a mapping that have a dotted address

    def addresses(self) -> tuple[str, ...]:
        """Every dotted address under which a single number of this metric is found."""
        if self.kind == "number":
            return (self.name,)
        return tuple(f"{self.name}.{key}" for key in (DISTRIBUTION_KEYS if self.kind == "distribution" else self.keys))
