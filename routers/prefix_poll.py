"""Polls the replicas' `GET /prefix_cache_state?form=FORM` for policies that route by what engines say they hold.

The route answers JSON, in one of two forms. `generation` is a whole number that changes whenever the rest does, so
that an unchanged report costs nothing to take:

    {"generation": 7, "block_size": 16, "form": "top-k", "prefixes": [{"token_hash": H, "blocks": N}, ...]}
    {"generation": 7, "block_size": 16, "form": "bloom", "bits": BASE64, "hashes": K}

`top-k` lists the engine's longest cached prefixes, each by its number of blocks and by XXH3-64 with seed 1337 over its
u32 little-endian tokens, which is a name that a router can compute itself; further keys of a row are the engine's own
affair. `bloom` is a filter of the token hashes of *every* cached prefix (each block is the end of one), whose K bits
per hash are `hashing.bloom_positions`. Prefixes under a salt or an adapter are in neither, since their tokens do not
say who may hit them. A report in blocks of another size than the router's is of no use and counted.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable

import aiohttp
import msgspec

from routers.errors import WireError
from routers.poll import Poll
from routers.router import Router
from routers.view import Bloom, ReportedPrefixes


class PrefixPollStats(msgspec.Struct):
    polls: int = 0
    unchanged: int = 0
    failed: int = 0  # no answer, or one that cannot be read
    absent: int = 0  # the replica has no such route
    last_error: str | None = None


class _Row(msgspec.Struct):
    token_hash: int
    blocks: int


class _State(msgspec.Struct):
    generation: int
    block_size: int
    form: str
    prefixes: list[_Row] = []
    bits: str = ""
    hashes: int = 0


_STATE = msgspec.json.Decoder(_State)


def parse_prefix_state(body: bytes, replica: str, block_size: int, at_us: int) -> ReportedPrefixes:
    """Raises WireError for what is no such report or one of no use here."""
    try:
        state = _STATE.decode(body)
        data = base64.b64decode(state.bits, validate=True)
    except (msgspec.DecodeError, binascii.Error, RecursionError) as error:
        raise WireError(f"no prefix report ({error}): is this our engine's /prefix_cache_state?") from error
    if state.block_size != block_size:
        raise WireError(
            f"a report in blocks of {state.block_size} tokens cannot be matched: give --block-size {state.block_size}"
        )
    if state.form == "top-k":
        rows = tuple((row.token_hash, row.blocks) for row in state.prefixes)
        return ReportedPrefixes(replica, state.generation, rows, at_us)
    if state.form == "bloom" and state.hashes >= 1:
        return ReportedPrefixes(replica, state.generation, (), at_us, Bloom(data, state.hashes))
    raise WireError(f"a report of form {state.form!r} with {state.hashes} hashes is not known: top-k and bloom are")


class PrefixPoll(Poll):
    def __init__(
        self,
        router: Router,
        session: aiohttp.ClientSession,
        now_us: Callable[[], int],
        interval_ms: int,
        block_size: int,
        form: str = "top-k",
    ) -> None:
        super().__init__(router, session, now_us, interval_ms)
        self.stats = PrefixPollStats()
        self._block_size = block_size
        self._form = form
        self._seen: dict[str, bytes] = {}

    def forget(self, replica: str) -> None:
        """It left the fleet or joined it: its next report is news whatever it says."""
        self._seen.pop(replica, None)

    async def ask(self, name: str, url: str) -> None:
        self.stats.polls += 1
        try:
            status, body = await self.fetch(f"{url}/prefix_cache_state?form={self._form}")
            if status == 404:
                self.stats.absent += 1
                return
            if status != 200:
                raise WireError(f"{url}/prefix_cache_state answers {status}")
            if self._seen.get(name) == body:
                self.stats.unchanged += 1
                return
            self.router.reported_prefixes(parse_prefix_state(body, name, self._block_size, self.now_us()))
            self._seen[name] = body
        except (TimeoutError, aiohttp.ClientError, OSError, WireError) as error:
            self.stats.failed += 1
            self.stats.last_error = f"replica {name}: {error or type(error).__name__}"
