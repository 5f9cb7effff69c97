"""One arm's router as a scenario names it: a policy of ours, a real router that we start, or one that already runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import UsageError
from harness.peers import PEERS, find_peer
from routers import Policy, RoutersError, make_policy

ROUTER_NAME = re.compile(r"[\w./][\w.:+/@~-]*")


class RouterEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm of the comparison: a policy of ours, a real router that we start, or one that already runs."""

    name: str
    policy: str | None = None
    """A policy of ours, when `name` is another word for it."""
    options: dict[str, Any] = {}
    """Options of that policy."""
    preset: str | None = None
    """A real router that routebench knows how to start: `vllm-router`, or with a variant `vllm-router:kv_aware`."""
    args: tuple[str, ...] = ()
    """Further arguments of a preset's or template's command line."""
    command: tuple[str, ...] = ()
    """Template of a command that starts any other router; see `harness.peers.PLACEHOLDERS` for what it may hold."""
    ready_path: str = "/health"
    """Where a router started by `command` answers 200 when it is ready."""
    url: str | None = None
    """Address of a router that already runs."""

    def __post_init__(self) -> None:
        if not ROUTER_NAME.fullmatch(self.name):
            raise ValueError(f"name = {self.name!r}: use letters, digits and . _ : + / @ ~ -, no spaces")
        kinds = [kind for kind in ("policy", "preset", "command", "url") if getattr(self, kind)]
        if len(kinds) > 1:
            raise ValueError(f"router {self.name!r} has {' and '.join(kinds)}: it is one of them, remove the others")
        if self.options and self.foreign:
            raise ValueError(f"router {self.name!r} has options, which policies of ours take: use args, or remove them")
        if self.args and not (self.peer or self.command):
            raise ValueError(f"router {self.name!r} has args, which go with preset or command: use options for ours")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r}: give a full address such as 'http://127.0.0.1:8080'")

    @property
    def peer(self) -> str | None:
        """The preset, with its variant, of a real router that we start."""
        if self.preset:
            return self.preset
        plain = not (self.policy or self.command or self.url)
        return self.name if plain and self.name.partition(":")[0] in PEERS else None

    @property
    def foreign(self) -> bool:
        """Not a policy of ours: it decides in a process that is not ours and cannot run in virtual time."""
        return bool(self.peer or self.command or self.url)

    @property
    def of_a_file(self) -> bool:
        """A policy from a file of the user's."""
        return not self.foreign and ".py:" in (self.policy or self.name)

    @property
    def may_ask_for_ids(self) -> bool:
        """Whether a request may ask for the answer's token ids without being routed otherwise for it."""
        return self.peer is None or find_peer(self.peer.partition(":")[0]).may_ask_for_ids

    @property
    def policy_name(self) -> str:
        """The policy as a router process, which runs in another folder, is told it: a file of the user's in full."""
        name = self.policy or self.name
        file, _, kind = name.rpartition(":")
        return f"{Path(file).resolve()}:{kind}" if file.endswith(".py") else name

    def build(self, rng: Any, block_size: int) -> Policy:
        """The policy this entry names. Raises UsageError for an unknown name or option."""
        try:
            return make_policy(self.policy_name, dict(self.options), rng=rng, block_size=block_size)
        except RoutersError as error:
            raise UsageError(f"router {self.name!r}: {error}") from error

    def check_api(self, api: str) -> None:
        """Raises UsageError if a real router cannot carry requests of this form."""
        if self.peer:
            preset = find_peer(self.peer.partition(":")[0])
            if api not in preset.apis:
                raise UsageError(
                    f"router {self.name!r} cannot carry load.api = {api!r}: choose one of {', '.join(preset.apis)}"
                )

    def resolved(self) -> dict[str, Any]:
        """The entry as a scenario file could hold it."""
        if not self.foreign:
            return {"name": self.name, "policy": self.policy or self.name, "options": self.options}
        given = msgspec.to_builtins(self)
        kept = (
            ("name", "preset", "args", "command", "url")
            if not self.command
            else ("name", "command", "args", "ready_path")
        )
        return {key: list(v) if isinstance(v, tuple) else v for key in kept if (v := given[key])}
