"""Whether a policy keeps its promises: its class when it is loaded, itself when it is made, its answer at each turn.

A policy is often somebody's first draft, so what it gets wrong is said in terms of its own file: found, why it cannot
work, what to write instead. Law: `decided` touches nothing and costs a handful of comparisons when all is well; only
an answer that is refused is looked at closely.
"""

from __future__ import annotations

import inspect
import os
import traceback
from typing import Any

from routers.errors import DecisionError, FleetError, OptionError
from routers.view import Decision, FleetView, Policy, Signal

TOKENS_MAX = 1 << 53
"""No prompt is as long; a larger belief would fit into no column of a result."""


def decided(answer: Any, policy: Policy, fleet: FleetView) -> Decision:
    """What `choose` returned, if it is a decision that can be carried out and written down. Raises DecisionError, or
    FleetError for a replica that is not of `fleet`."""
    if isinstance(answer, Decision):
        believed, reason, rule = answer.believed_hit_tokens, answer.reason, answer.rule
        if (
            (believed is None or (type(believed) is int and 0 <= believed <= TOKENS_MAX))
            and type(reason) is str
            and (reason.isascii() or _is_text(reason))
            and type(rule) is str
            and (rule.isascii() or _is_text(rule))
            and (answer.scores is None or type(answer.scores) is dict)
            and type(answer.replica) is str
            and answer.replica in fleet
        ):
            return answer
    raise _refusal(answer, policy, fleet)


def _refusal(answer: Any, policy: Policy, fleet: FleetView) -> Exception:
    kind = type(policy)
    where = f"{kind.__name__}.choose ({_defined_at(getattr(kind, 'choose', None))})"
    if not isinstance(answer, Decision):
        if inspect.iscoroutine(answer):
            answer.close()  # else Python would warn of it later, in words that name no policy
        return DecisionError(f"{where} returned {_short(answer)}: return a Decision(replica, reason, rule)")
    if type(answer.replica) is not str:
        return DecisionError(f"{where} chose the replica {_short(answer.replica)}: give the name of one, as a str")
    for name in ("reason", "rule"):
        value = getattr(answer, name)
        if type(value) is not str:
            return DecisionError(f"{where} gave {name}={_short(value)}: give a str")
        if not _is_text(value):
            return DecisionError(
                f"{where} gave a {name} with half a character in it ({_short(value)}), which no file can hold: "
                "decode what it is made of with errors='replace'"
            )
    if answer.scores is not None and type(answer.scores) is not dict:
        return DecisionError(f"{where} gave scores={_short(answer.scores)}: give a dict of numbers by replica, or None")
    believed = answer.believed_hit_tokens
    if believed is not None and not (type(believed) is int and 0 <= believed <= TOKENS_MAX):
        return DecisionError(
            f"{where} gave believed_hit_tokens={_short(believed)}: give a whole number of tokens from 0, "
            "or None where nothing is believed"
        )
    return FleetError(
        f"the policy chose {answer.replica!r}, which is not routable now "
        f"({', '.join(view.name for view in fleet)} are): return the name of a replica of the given fleet "
        f"in {where}"
    )


def check_class(found: object, where: str) -> None:
    """Raises OptionError for what is no policy, or one whose methods cannot be called as a policy's are."""
    if not isinstance(found, type) or not hasattr(found, "choose") or not hasattr(found, "observe"):
        raise OptionError(
            f"{where} is not a policy: it must be a class with choose(turn, fleet) and observe(event), "
            f"best one that derives from routers.BasePolicy"
        )
    for name in ("choose", "observe"):
        method = inspect.getattr_static(found, name)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise OptionError(
                f"{where} cannot work: its {name} is `async def` ({_defined_at(method)}), and a policy decides at "
                f"once: write `def {name}`"
            )


def check_needs(policy: Policy, name: str) -> None:
    """Raises OptionError unless `needs` is a set of signals."""
    needs: Any = getattr(policy, "needs", None)
    odd = [one for one in needs if not isinstance(one, Signal)] if isinstance(needs, set | frozenset) else [needs]
    if odd:
        choice = ", ".join(f"Signal.{signal.name}" for signal in Signal)
        raise OptionError(
            f"policy {name!r} needs {_short(odd[0])}, which is no signal: write needs = frozenset({{...}}) of {choice}"
        )


def told(error: BaseException, file: str | None = None) -> str:
    """An error of a policy's code in one line: its kind, the first line that it says, and where in `file` (any file,
    without one) it came from."""
    said = str(error).partition("\n")[0]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        at = f"{os.path.basename(error.filename or '?')}, line {error.lineno}"
        return f"{type(error).__name__}: {error.msg} ({at})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is None or _same(frame.filename, file)]
    at = f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{': ' if said else ''}{said}{at}"


def defined_at(kind: type, name: str) -> str:
    """Where a class, or who it derives from, defines a method."""
    return _defined_at(inspect.getattr_static(kind, name, None))


def _defined_at(method: Any) -> str:
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
    return f"{os.path.basename(code.co_filename)}, line {code.co_firstlineno}" if code is not None else "built in"


def _same(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: Python's strings can hold halves of surrogate pairs, files cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    """As in code, but never long, whatever its own `__repr__` does."""
    try:
        text = ascii(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
