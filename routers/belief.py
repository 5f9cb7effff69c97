"""What decisions expected of replicas' caches against what the replicas then said that they served.

Pure counting, by the rule that decided; a request of which one of the two is not known counts nowhere.
"""

from __future__ import annotations

import msgspec


class Belief(msgspec.Struct):
    """What decisions of one rule believed against what the replicas then served, where both are known."""

    requests: int = 0
    believed_tokens: int = 0
    served_tokens: int = 0
    phantom_tokens: int = 0  # believed and not served
    missed_tokens: int = 0  # served and not believed
    stale: int = 0  # requests that were to hit and hit nothing at all

    def add(self, believed: int, served: int) -> None:
        self.requests += 1
        self.believed_tokens += believed
        self.served_tokens += served
        self.phantom_tokens += max(0, believed - served)
        self.missed_tokens += max(0, served - believed)
        self.stale += served == 0 < believed
