"""One arm's router as a scenario names it: a policy of ours, a real router that we start, or one that already runs."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import UsageError, choose_from
from harness.ingress import OF_ANY_ROUTER, SETUP_KEYS, RouterSetup, overridden
from harness.peers import PEERS, PLACEHOLDERS, expand_command, find_peer
from harness.spread import Spread
from routers import Policy, RouterFaults, RoutersError, Signal, make_policy

NO_ROUTER_FAULTS = RouterFaults()
ROUTER_NAME = re.compile(r"[\w./][\w.:+/@~-]*")


class RouterEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm of the comparison: a policy of ours, a real router that we start, or one that already runs."""

    name: str
    policy: str | None = None
    """A policy of ours, when `name` is another word for it."""
    options: dict[str, Any] = {}
    """Options of that policy."""
    faults: dict[str, Any] = {}
    """What this router alone does wrong: names as in `[faults]` without their `router_`, on top of those there."""
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
    ingresses: int | None = None
    spread: Spread | None = None
    share_load: bool | None = None
    share_delay_ms: float | None = None
    ramp_s: float | None = None
    metrics_interval_ms: int | None = None
    prefix_interval_ms: int | None = None
    """These keys are of the scenario's `[router]`, overridden for this router; see `harness.ingress.RouterSetup`."""

    def __post_init__(self) -> None:
        if not ROUTER_NAME.fullmatch(self.name):
            raise ValueError(f"name = {self.name!r}: use letters, digits and . _ : + / @ ~ -, no spaces")
        kinds = [kind for kind in ("policy", "preset", "command", "url") if getattr(self, kind)]
        if len(kinds) > 1:
            raise ValueError(f"router {self.name!r} has {' and '.join(kinds)}: it is one of them, remove the others")
        if self.options and self.foreign:
            raise ValueError(f"router {self.name!r} has options, which policies of ours take: use args, or remove them")
        if self.faults and self.foreign:
            raise ValueError(f"router {self.name!r} has faults, which routers of ours commit: remove them")
        self.faults_over(NO_ROUTER_FAULTS)
        if self.args and not (self.peer or self.command):
            raise ValueError(f"router {self.name!r} has args, which go with preset or command: use options for ours")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r}: give a full address such as 'http://127.0.0.1:8080'")

    def faults_over(self, common: RouterFaults) -> RouterFaults:
        """This router's faults, `common` being those of all routers. Raises ValueError for one that there is not."""
        for key in self.faults:
            if key not in RouterFaults.__struct_fields__:
                known = choose_from(key, RouterFaults.__struct_fields__)
                raise ValueError(f"router {self.name!r}: unknown key {key!r} in faults: {known}")
        try:
            return msgspec.convert({**msgspec.structs.asdict(common), **self.faults}, RouterFaults)
        except (RoutersError, msgspec.ValidationError) as error:
            raise ValueError(f"router {self.name!r}: faults: {error}") from error

    @property
    def overrides(self) -> dict[str, Any]:
        """What it says of itself in place of the scenario's `[router]`."""
        return {key: value for key in SETUP_KEYS if (value := getattr(self, key)) is not None}

    def setup(self, common: RouterSetup) -> RouterSetup:
        """How it is run, given the scenario's `[router]`. Raises UsageError."""
        for key in self.overrides:
            if self.foreign and key not in OF_ANY_ROUTER:
                raise UsageError(f"router {self.name!r} has {key}, which only routers of ours know: remove it")
        if self.foreign:  # it would be told nothing of the other keys
            common = RouterSetup(**{key: getattr(common, key) for key in OF_ANY_ROUTER})
        try:
            setup = overridden(common, self.overrides)
        except ValueError as error:
            raise UsageError(f"router {self.name!r}: {error}") from error
        if self.url and setup.ingresses > 1:
            raise UsageError(
                f"router {self.name!r} already runs at one address, so {setup.ingresses} ingresses of it cannot be "
                "started: give it ingresses = 1"
            )
        if self.share_delay_ms and not setup.share_load:
            raise UsageError(f"router {self.name!r} has share_delay_ms and shares no load: set share_load = true, too")
        return setup

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

    def hears_events(self, block_size: int) -> bool:
        """Whether it is a policy of ours that decides by KV events. Raises UsageError."""
        return not self.foreign and Signal.KV_EVENTS in self.build(random.Random(0), block_size).needs

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

    def check_words(self) -> None:
        """Raises UsageError for a name in braces that stands for nothing."""
        try:
            expand_command((*self.command, *self.args), (), dict.fromkeys(PLACEHOLDERS, ""))
        except UsageError as error:
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
            faults = {"faults": self.faults} if self.faults else {}
            policy = self.policy or self.name
            return {"name": self.name, "policy": policy, "options": self.options, **faults, **self.overrides}
        given = msgspec.to_builtins(self)
        kept = (
            ("name", "preset", "args", "command", "url")
            if not self.command
            else ("name", "command", "args", "ready_path")
        )
        told = {key: list(v) if isinstance(v, tuple) else v for key in kept if (v := given[key])}
        return {**told, **self.overrides}
