"""Every error this package raises on purpose, in one tree.

    RoutersError
    |-- OptionError        a policy, variant, option or value that does not exist or cannot work
    |-- FleetError         a replica that is unknown, or known already
    |   `-- NoReplica      nobody is left to route to
    |-- LedgerError        a request that is in flight already, or is not
    |-- DecisionError      a policy answered with what is no decision
    |-- EventError         a KV event whose parts contradict each other
    |   `-- WireError      bytes that are not a KV event batch of vLLM
    |-- StartError         the process cannot start: taken port, malformed --replica
    `-- UpstreamError      a replica did not answer as HTTP asks (shell only)
        |-- RefusedError   no connection came about, so nothing was sent
        `-- BrokenError    the connection failed after it was made

Messages say what was found, why it cannot work and what to change.
"""

from __future__ import annotations


class RoutersError(Exception):
    """Base of all."""


class OptionError(RoutersError, ValueError):
    """A name or value from a user cannot be used."""


class FleetError(RoutersError, LookupError):
    """The named replica is not what the call expects."""


class NoReplica(FleetError):
    """No routable replica is left (all removed, draining or excluded)."""


class LedgerError(RoutersError, LookupError):
    """A lifecycle call about a request that is not in that state."""


class DecisionError(RoutersError, ValueError):
    """What a policy returned cannot be carried out or written down; the message says where its code is."""


class EventError(RoutersError, ValueError):
    """The parts of one KV event do not fit together."""


class WireError(EventError):
    """A payload that cannot be read as a KV event batch."""


class StartError(RoutersError):
    """The router process cannot start; the message names the mend."""


class UpstreamError(RoutersError):
    """Talking to a replica failed."""


class RefusedError(UpstreamError):
    """The replica took no connection; the request may go elsewhere unharmed."""


class BrokenError(UpstreamError):
    """The replica took the request and the connection failed afterwards."""
