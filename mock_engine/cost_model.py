"""How long one engine step takes, given what the scheduler put into it.

    step   = step_fixed + linear + prefill_attention * A + sequence * S + kv_read * K
    linear = max(weight_read, token * N)                                   dense model
    linear = weight_read * (1 - (1 - top_k / experts) ** N) + token * N    mixture of experts

N scheduled tokens, S scheduled sequences, A query-key pairs of prefill (new * (already + (new + 1) / 2) a chunk), K sum
of the decodes' context lengths, the token being fed included. Everything is whole picoseconds inside, so that n equal
steps added up and the closed form n * T0 + kv_read * D * n * (n - 1) / 2 are the same number.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from random import Random
from typing import NamedTuple

from mock_engine.errors import ConfigError

PS_PER_US = 1_000_000
PS_PER_NS = 1_000

_ONE = 1 << 64  # fixed point of the expert share: exact on every platform, unlike floating powers
_JITTER_ONE = 1 << 32


class Batch(NamedTuple):
    """What the cost formula asks of a step."""

    tokens: int = 0  # N
    sequences: int = 0  # S
    prefill_pairs: int = 0  # A
    context_tokens: int = 0  # K

    @classmethod
    def of(cls, prefills: Iterable[tuple[int, int]] = (), decode_contexts: Iterable[int] = ()) -> "Batch":
        """From prefill chunks (new tokens, tokens already in the cache) and the decodes' context lengths."""
        tokens = sequences = pairs = context = 0
        for new, already in prefills:
            tokens += new
            sequences += 1
            pairs += prefill_pairs(new, already)
        for length in decode_contexts:
            tokens += 1
            sequences += 1
            context += length
        return cls(tokens, sequences, pairs, context)


def prefill_pairs(new: int, already: int) -> int:
    return new * already + new * (new + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Coefficients in the units of the table that they are published in; the `*_ps` are derived."""

    step_fixed_us: float
    weight_read_us: float = 0.0
    token_us: float = 0.0
    prefill_attention_ns: float = 0.0
    sequence_us: float = 0.0
    kv_read_ns: float = 0.0
    request_fixed_us: int = 0  # once a request, before it enters the queue; whoever submits charges it
    experts: int = 0  # 0: dense
    top_k: int = 0
    jitter: float = 0.0  # a step takes 1 - jitter .. 1 + jitter times as long, drawn from the engine's rng
    step_fixed_ps: int = field(init=False, repr=False)
    weight_read_ps: int = field(init=False, repr=False)
    token_ps: int = field(init=False, repr=False)
    prefill_attention_ps: int = field(init=False, repr=False)
    sequence_ps: int = field(init=False, repr=False)
    kv_read_ps: int = field(init=False, repr=False)
    _expert_reads: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.init and getattr(self, item.name) < 0:
                raise ConfigError(f"{item.name}={getattr(self, item.name)} makes time run backwards: give 0 or more")
        if not self.jitter < 1:
            raise ConfigError(f"jitter={self.jitter} lets a step take no time: give a share below 1")
        if bool(self.experts) != bool(self.top_k) or self.top_k > self.experts:
            raise ConfigError(
                f"experts={self.experts} with top_k={self.top_k} is no mixture of experts: give both, top_k being the "
                "smaller, or neither for a dense model"
            )
        for name in ("step_fixed", "weight_read", "token", "sequence"):
            object.__setattr__(self, f"{name}_ps", round(getattr(self, f"{name}_us") * PS_PER_US))
        for name in ("prefill_attention", "kv_read"):
            object.__setattr__(self, f"{name}_ps", round(getattr(self, f"{name}_ns") * PS_PER_NS))
        object.__setattr__(self, "_expert_reads", {})

    @property
    def floor_ps(self) -> int:
        """No step takes less; a step that schedules nothing takes just this."""
        fixed = max(self.step_fixed_ps, 1)
        return max(fixed - int(fixed * self.jitter) - 1, 1) if self.jitter else fixed

    def step_ps(self, batch: Batch) -> int:
        """Picoseconds, at least one; without jitter."""
        tokens, sequences, pairs, context = batch
        if not tokens:
            return max(self.step_fixed_ps, 1)
        linear = self.token_ps * tokens
        if self.experts:
            linear += self._expert_read_ps(tokens)
        elif linear < self.weight_read_ps:
            linear = self.weight_read_ps
        return max(
            self.step_fixed_ps
            + linear
            + self.prefill_attention_ps * pairs
            + self.sequence_ps * sequences
            + self.kv_read_ps * context,
            1,
        )

    def _expert_read_ps(self, tokens: int) -> int:
        read = self._expert_reads.get(tokens)
        if read is None:
            untouched = _power((self.experts - self.top_k) * _ONE // self.experts, tokens)
            read = self._expert_reads[tokens] = (self.weight_read_ps * (_ONE - untouched) + _ONE // 2) // _ONE
        return read

    def jittered_ps(self, step_ps: int, rng: Random) -> int:
        if not self.jitter:
            return step_ps
        factor = _JITTER_ONE + round((2 * rng.random() - 1) * self.jitter * _JITTER_ONE)
        return max(step_ps * factor // _JITTER_ONE, self.floor_ps)


def _power(base: int, exponent: int) -> int:
    """base ** exponent in 64-bit fixed point."""
    result = _ONE
    while exponent:
        if exponent & 1:
            result = result * base // _ONE
        base = base * base // _ONE
        exponent >>= 1
    return result


def stretch_ps(first_ps: int, growth_ps: int, steps: int) -> int:
    """Length of `steps` steps of which the first takes `first_ps` and each later one `growth_ps` more."""
    return steps * first_ps + growth_ps * (steps * (steps - 1) // 2)


def steps_before(limit_ps: int, first_ps: int, growth_ps: int, steps_max: int) -> int:
    """How many of these steps start strictly before `limit_ps` after the start of the first, at most `steps_max`."""
    low, high = 0, steps_max
    while low < high:
        middle = (low + high) // 2
        if stretch_ps(first_ps, growth_ps, middle) < limit_ps:
            low = middle + 1
        else:
            high = middle
    return low


def ceil_us(ps: int) -> int:
    """The edge where picoseconds become whole microseconds."""
    return -(-ps // PS_PER_US)
