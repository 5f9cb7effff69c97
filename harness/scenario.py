"""A scenario: what is run against which routers, read from TOML and checked before anything starts.

Law: every key is known, every default is written in one place (the field that holds it, or the room that
owns the option), and `resolved()` gives all of them back, so that a run says exactly what it was. The engine
and workload tables are checked by the rooms they belong to; this module only composes them.
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.churn import ChurnEntry, ChurnEvent, churn_events, names_with_added
from harness.drive import ALIASES, BY_INSTANTS, OF_SLOTS, Load, Stage, unaliased
from harness.errors import UsageError, choose_from
from harness.expect import Expectation
from harness.faults import FaultTable, read_faults
from harness.fleet_table import Fleet
from harness.ingress import RouterSetup
from harness.key_errors import explain
from harness.overrides import apply_override
from harness.planned import (
    check_together,
    extent_of,
    planned,
    require_an_end,
    require_enough,
    require_slots_in_use,
)
from harness.router_entry import RouterEntry
from mock_engine import DEFAULT_BLOCK_SIZE, EngineConfig, MockEngineError, Preset, load_preset
from routers import RouterFaults
from workloads import WORKLOADS, Streams, WorkloadsError, WorkloadTable, make_workload, resolved

BUILTIN = resources.files("harness") / "scenarios"


ROUTERS_MAX = 1000
ABOUT_CHARS_MAX = 2000
REPEATS_MAX = 1000
"""More intervals than anybody needs; all arms are planned before the first begins."""
SCENARIO_NAME = re.compile(r"[^\W_][\w .+-]{0,79}")


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a scenario file, before the rooms check their own tables."""

    name: str
    workload: dict[str, Any]
    about: str = ""
    seed: int = 42
    repeats: int = 1
    routers: tuple[str | RouterEntry, ...]
    fleet: Fleet = Fleet()
    engine: dict[str, Any] = {}
    load: Load = Load()
    router: RouterSetup = RouterSetup()
    churn: tuple[ChurnEntry, ...] = ()
    faults: dict[str, Any] = {}
    slo: dict[str, float] = {}
    expect: tuple[Expectation, ...] = ()

    def __post_init__(self) -> None:
        if not SCENARIO_NAME.fullmatch(self.name):
            raise ValueError(
                f"name = {self.name[:80]!r}: it names folders, so use up to 80 letters, digits, spaces and . _ + -, "
                "beginning with a letter or digit"
            )
        if len(self.about) > ABOUT_CHARS_MAX:
            raise ValueError(
                f"about has {len(self.about):,} characters, at most {ABOUT_CHARS_MAX:,}: every report shows it, so say "
                "it in a line or two"
            )
        if len(self.routers) > ROUTERS_MAX:
            raise ValueError(
                f"routers has {len(self.routers):,} entries, at most {ROUTERS_MAX:,}: each is an arm of its own, so "
                "compare fewer at once"
            )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed = {self.seed}: give a whole number from 0 to {2**31 - 1}")
        if not 1 <= self.repeats <= REPEATS_MAX:
            raise ValueError(f"repeats = {self.repeats}: give a whole number from 1 to {REPEATS_MAX}")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A checked scenario; every part of it is known to work together."""

    name: str
    about: str
    seed: int
    repeats: int
    routers: tuple[RouterEntry, ...]
    fleet: Fleet
    engine: EngineConfig
    preset: Preset
    preset_ref: str
    workload_table: dict[str, Any]
    load: Load
    slo: dict[str, float]
    expect: tuple[Expectation, ...] = ()
    faults: FaultTable = FaultTable()
    router: RouterSetup = RouterSetup()
    churn_table: tuple[ChurnEntry, ...] = ()
    churn: tuple[ChurnEvent, ...] = ()
    """What the table says, event by event."""

    @property
    def workload(self) -> dict[str, Any]:
        """The workload's table with every default, as `workloads.make_workload` takes it."""
        return self.workload_table

    @property
    def answers(self) -> Literal["known", "live"]:
        """Whether answers are what their seeds stand for, as ours are, or whatever a foreign engine says."""
        return "live" if self.fleet.urls or any(entry.url for entry in self.routers) else "known"

    @property
    def verify_answers(self) -> Literal["first", "none"]:
        """Asking an answer for its token ids makes some real routers see no prefix; then no arm of the run asks."""
        return "first" if all(entry.may_ask_for_ids for entry in self.routers) else "none"

    def router_faults(self, entry: RouterEntry) -> RouterFaults:
        """What a router of this scenario does wrong."""
        return entry.faults_over(self.faults.router)

    @property
    def replica_names(self) -> tuple[str, ...]:
        """Every replica that is ever there."""
        return names_with_added(self.fleet.names, self.churn)

    def make_workload(self) -> WorkloadTable:
        return make_workload(self.workload_table)

    def resolved(self) -> dict[str, Any]:
        """The scenario as plain data with every default filled in; `run.json` carries it."""
        return {
            "name": self.name,
            "about": self.about,
            "seed": self.seed,
            "repeats": self.repeats,
            "routers": [entry.resolved() for entry in self.routers],
            "fleet": msgspec.to_builtins(self.fleet),
            "engine": {"preset": self.preset_ref, **msgspec.to_builtins(self.engine)},
            "workload": self.workload_table,
            "load": msgspec.to_builtins(self.load),
            "router": msgspec.to_builtins(self.router),
            "churn": [_given(entry) for entry in self.churn_table],
            "faults": self.faults.to_table(),
            "slo": dict(self.slo),
            "expect": [_given(expectation) for expectation in self.expect],
        }


def _given(entry: msgspec.Struct) -> dict[str, Any]:
    """An entry of a list as a file could hold it."""
    return {key: value for key, value in msgspec.to_builtins(entry).items() if value not in (None, [], ())}


def builtin_names() -> list[str]:
    """Names of the scenarios that ship with the product, sorted."""
    return sorted(entry.name[: -len(".toml")] for entry in BUILTIN.iterdir() if entry.name.endswith(".toml"))


SCENARIO_BYTES_MAX = 1 << 22
"""So that a wrong file, or a device without an end, is not read whole."""


def scenario_text(name_or_path: str) -> tuple[str, str]:
    """(text, where it came from). A built-in name wins unless the argument has a `/` or ends in `.toml`."""
    if "/" not in name_or_path and not name_or_path.endswith(".toml"):
        if name_or_path not in builtin_names():
            raise UsageError(
                f"no scenario named {name_or_path!r}: {choose_from(name_or_path, builtin_names())}; "
                f"for a file of yours give its path, such as ./{name_or_path}.toml"
            )
        return (BUILTIN / f"{name_or_path}.toml").read_text("utf-8"), name_or_path
    path = Path(name_or_path)
    try:
        with path.open("rb") as file:
            text = file.read(SCENARIO_BYTES_MAX + 1)
        if len(text) > SCENARIO_BYTES_MAX:
            raise UsageError(f"{path} has more than {SCENARIO_BYTES_MAX >> 20} MiB: no scenario is that long")
        return text.decode("utf-8"), str(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text, or its name is none"
        raise UsageError(
            f"cannot read the scenario {path}: {why}; `routebench scenarios` lists the built-in ones"
        ) from error


def load_scenario(
    name_or_path: str,
    *,
    overrides: Sequence[str] = (),
    routers: Sequence[str] = (),
    seed: int | None = None,
    repeats: int | None = None,
) -> Scenario:
    """The scenario of a built-in name or a TOML file, with `key=value` overrides and a replaced router list.

    Raises UsageError that names the key and the mend.
    """
    text, where = scenario_text(name_or_path)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(table, override)
    if routers:
        table["routers"] = list(routers)
        table.pop("expect", None)  # what was expected is about the scenario's own routers
    if seed is not None:
        table["seed"] = seed
    if repeats is not None:
        table["repeats"] = repeats
    return check_scenario(table, where)


def check_scenario(table: Mapping[str, Any], where: str) -> Scenario:
    """Checks a scenario table as a whole. Raises UsageError."""
    file = _convert(table, where)
    try:
        entries = tuple(r if isinstance(r, RouterEntry) else RouterEntry(name=r) for r in _routers(file, where))
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error
    engine, preset, preset_ref = _engine(file.engine, where)
    try:
        churn = churn_events(file.churn, file.fleet.names)
        faults = read_faults(file.faults, names_with_added(file.fleet.names, churn))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    scenario = Scenario(
        name=file.name,
        about=file.about,
        seed=file.seed,
        repeats=file.repeats,
        routers=entries,
        fleet=file.fleet,
        engine=engine,
        preset=preset,
        preset_ref=preset_ref,
        workload_table=_workload(file.workload, where),
        load=file.load,
        slo=_slo(file.slo, where),
        expect=file.expect,
        faults=faults,
        router=file.router,
        churn_table=file.churn,
        churn=churn,
    )
    said = set(table.get("load") or ()) & {*OF_SLOTS, *ALIASES}
    return msgspec.structs.replace(scenario, load=_check_together(scenario, where, slots_said=bool(said)))


def _convert(table: Mapping[str, Any], where: str) -> _File:
    try:
        table = {**table, **({"load": unaliased(table["load"])} if isinstance(table.get("load"), Mapping) else {})}
    except ValueError as error:
        raise UsageError(f"{where}: load: {error}") from error
    try:
        return msgspec.convert(dict(table), _File)
    except msgspec.ValidationError as error:
        workload = table.get("workload")
        kind = WORKLOADS.get(str(workload.get("kind"))) if isinstance(workload, Mapping) else None
        places = {**_PLACES, **({".workload": kind} if kind else {})}
        raise UsageError(f"{where}: {explain(str(error), places)}") from error


_PLACES: dict[str, type[msgspec.Struct]] = {
    "": _File,
    ".fleet": Fleet,
    ".load": Load,
    ".load.stages[...]": Stage,
    ".routers[...]": RouterEntry,
    ".expect[...]": Expectation,
    ".router": RouterSetup,
    ".engine": EngineConfig,
    ".churn[...]": ChurnEntry,
}


def _routers(file: _File, where: str) -> Sequence[str | RouterEntry]:
    if not file.routers:
        raise UsageError(
            f"{where}: routers is empty, so there is nothing to compare: "
            'name at least one, such as routers = ["round-robin"]'
        )
    names = [r if isinstance(r, str) else r.name for r in file.routers]
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise UsageError(
            f"{where}: router {sorted(twice)[0]!r} stands twice: names in one run are unique, so drop one "
            'or give it another name with { name = "...", policy = "..." }'
        )
    return file.routers


DEFAULT_PRESET = "llama-3.1-8b-h100"


def _engine(table: dict[str, Any], where: str) -> tuple[EngineConfig, Preset, str]:
    """(options, step costs, how the preset is named to a replica's process)."""
    fields = dict(table)
    ref = fields.pop("preset", DEFAULT_PRESET)
    if not isinstance(ref, str):
        raise UsageError(f"{where}: engine.preset = {ref!r}: give a preset's name or a path to a TOML file")
    path, toml, name = ref.partition(".toml")
    if toml:  # a replica runs in another folder
        ref = f"{Path(path + toml).resolve()}{name}"
    unknown = sorted(set(fields) - set(EngineConfig.__struct_fields__))
    if unknown:
        mend = choose_from(unknown[0], ("preset", *EngineConfig.__struct_fields__))
        raise UsageError(f"{where}: unknown key {unknown[0]!r} in engine: {mend}")
    try:
        preset = load_preset(ref)
        block_size = fields.get("block_size", DEFAULT_BLOCK_SIZE)
        if isinstance(block_size, int) and block_size > 0:
            fields.setdefault("num_gpu_blocks", preset.blocks_of(block_size))
        return EngineConfig.from_mapping(fields), preset, ref
    except MockEngineError as error:
        why = explain(str(error).removeprefix("engine options: "), {"": EngineConfig})
        raise UsageError(f"{where}: engine: {why}") from error


def _workload(table: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        return resolved(make_workload(table))
    except WorkloadsError as error:
        raise UsageError(f"{where}: workload: {error}") from error


SLO_KEYS = ("ttft_ms", "tpot_ms", "e2e_ms")


def _slo(slo: dict[str, float], where: str) -> dict[str, float]:
    for key, bound in slo.items():
        if key not in SLO_KEYS:
            raise UsageError(f"{where}: unknown key {key!r} in slo: {choose_from(key, SLO_KEYS)}")
        if not 0 < bound < math.inf:
            raise UsageError(f"{where}: slo.{key} = {bound}: a bound is a time above 0 ms")
    return dict(slo)


def _check_together(scenario: Scenario, where: str, *, slots_said: bool) -> Load:
    """What no single table can know. Returns the load as it will really be driven."""
    workload, load = scenario.make_workload(), scenario.load
    try:
        check_together(workload, load, load.processes)
        slots = load.concurrency if load.driver == "sessions" else None
        extent = extent_of(planned(workload, load, Streams(scenario.seed)), slots)
        if load.driver == "sessions" and slots_said:
            require_slots_in_use(extent)
        elif load.driver == "sessions" and extent.timed and not extent.waiting_for_slots:
            load = Load(**{**msgspec.structs.asdict(load), "concurrency": None, **BY_INSTANTS})
            check_together(workload, load, load.processes)
        require_an_end(extent, len(scenario.fleet.names))
        require_enough(load, extent.waiting_for_slots, Streams(scenario.seed))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    except (WorkloadsError, ArithmeticError, MemoryError) as error:
        why = str(error) or type(error).__name__
        raise UsageError(
            f"{where}: the workload cannot be drawn: {why}; look for a number out of all proportion"
        ) from error
    longest, allowed = extent.longest_tokens, scenario.engine.max_model_len
    if longest > allowed and load.overlong == "refuse":
        raise UsageError(
            f"{where}: the longest session grows to {longest} tokens and engine.max_model_len is {allowed}: raise it, "
            "shorten the sessions, or write load.overlong = 'send' if errors of clients are what you want to see"
        )
    longest = min(longest, allowed)
    room = (scenario.engine.num_gpu_blocks - 1) * scenario.engine.block_size
    if longest > room and not scenario.fleet.urls:
        raise UsageError(
            f"{where}: the longest session grows to {longest} tokens and a replica's cache holds {room} "
            "(num_gpu_blocks less the null block, times block_size): raise engine.num_gpu_blocks "
            "or shorten the sessions"
        )
    for expectation in scenario.expect:
        for name in sorted(expectation.names() - {entry.name for entry in scenario.routers}):
            raise UsageError(
                f"{where}: the expectation {expectation.that!r} speaks of router {name!r}, which does not run here: "
                f"choose one of {', '.join(entry.name for entry in scenario.routers)}"
            )
    shared = False
    for entry in scenario.routers:
        try:
            shared |= entry.setup(scenario.router).exchanges
            entry.check_words()
            entry.check_api(scenario.load.api)
            if not entry.foreign:
                entry.build(random.Random(0), scenario.engine.block_size)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
    if scenario.router.share_load and not shared:
        raise UsageError(f"{where}: router.share_load = true and nobody to share with: set router.ingresses = 2, too")
    if scenario.router.share_delay_ms and not shared:
        raise UsageError(f"{where}: router.share_delay_ms delays nothing: set router.share_load = true, too")
    return load
