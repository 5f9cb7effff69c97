"""What the engine "says": a documented function of the request's seed and the position, so that the answer to a
request is known before it is sent.

Token k of seed s is splitmix64's k-th output for state s, folded into a range that holds no special ids. The
workload generator implements the same function on its own; a client that sends `seed` can check every answer.
"""

FIRST_TOKEN_ID = 1000
TOKEN_RANGE = 30_000

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def token_range(vocab_size: int | None = None) -> tuple[int, int]:
    """First id and number of ids that answers are made of; a vocabulary below 31,000 shrinks both."""
    if vocab_size is None:
        return FIRST_TOKEN_ID, TOKEN_RANGE
    first = min(FIRST_TOKEN_ID, vocab_size // 2)
    return first, min(TOKEN_RANGE, vocab_size - first)


def generated_token_ids(seed: int, start: int, count: int, vocab_size: int | None = None) -> list[int]:
    """The token ids at output positions start .. start + count - 1 of a request with this seed."""
    first, span = token_range(vocab_size)
    state = (seed + start * _GAMMA) & _MASK
    ids = []
    for _ in range(count):
        state = (state + _GAMMA) & _MASK
        x = ((state ^ (state >> 30)) * _MIX_1) & _MASK
        x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
        ids.append(first + (x ^ (x >> 31)) % span)
    return ids
