"""In-flight ledger: which request is on which replica, from the decision until its end.

Law: a replica's count is the number of its entries, and the entries are the requests that were routed and have not
ended. It knows only what this router sent; load that others put on a replica is invisible here.
"""

from __future__ import annotations

import msgspec

from routers.errors import LedgerError


class Entry(msgspec.Struct):
    replica: str
    prompt_tokens: int
    routed_us: int
    first_token: bool = False
    rule: str = ""
    believed: int | None = None  # tokens that the policy thought the replica would serve from its cache


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._requests: dict[str, int] = {}
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def requests(self, replica: str) -> int:
        return self._requests.get(replica, 0)

    def tokens(self, replica: str) -> int:
        """Prompt tokens of the requests in flight, as far as prompts were known."""
        return self._tokens.get(replica, 0)

    def open(
        self,
        request_id: str,
        replica: str,
        prompt_tokens: int,
        now_us: int,
        *,
        rule: str = "",
        believed: int | None = None,
    ) -> None:
        if request_id in self._entries:
            raise LedgerError(
                f"request {request_id!r} is already in flight on {self._entries[request_id].replica}: "
                f"end it first, or route the new one under another id"
            )
        self._entries[request_id] = Entry(replica, prompt_tokens, now_us, rule=rule, believed=believed)
        self._requests[replica] = self._requests.get(replica, 0) + 1
        self._tokens[replica] = self._tokens.get(replica, 0) + prompt_tokens

    def get(self, request_id: str) -> Entry:
        entry = self._entries.get(request_id)
        if entry is None:
            raise LedgerError(f"no request {request_id!r} is in flight: it was never routed, or has ended already")
        return entry

    def close(self, request_id: str) -> Entry:
        entry = self.get(request_id)
        del self._entries[request_id]
        self._requests[entry.replica] -= 1
        self._tokens[entry.replica] -= entry.prompt_tokens
        if not self._requests[entry.replica]:
            del self._requests[entry.replica], self._tokens[entry.replica]
        return entry
