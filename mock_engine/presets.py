"""Step-time presets: a model on a GPU as the numbers of the cost formula, its KV size and the evidence for both.

The built-in ones live in presets.toml beside this file, and a user's own file has the same form: one or more
`[[preset]]` tables. An unknown key is an error, as everywhere.
"""

import tomllib
from importlib import resources
from pathlib import Path

import msgspec

from mock_engine.cost_model import StepCost
from mock_engine.errors import ConfigError

_FILE = "presets.toml"
BLOCK_TOKENS = 16  # of `kv_blocks_16`


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors in percent; None: not measured."""

    kernel_fit_r2: float | None = None
    kernel_fit_median_pct: float | None = None
    kernel_fit_p95_pct: float | None = None
    kernel_fit_max_pct: float | None = None
    measured_rows: int = 0
    ttft_mean_abs_pct: float | None = None
    ttft_worst_pct: float | None = None
    tpot_mean_abs_pct: float | None = None
    tpot_worst_pct: float | None = None
    cv_ttft_mean_pct: float | None = None
    cv_tpot_mean_pct: float | None = None


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[preset]]` table; see the head of presets.toml for `form`, `basis` and the units."""

    name: str
    form: str = "max"
    basis: str = "user"
    tensor_parallel: int = 1
    step_fixed_us: float
    weight_read_us: float
    token_us: float
    prefill_attention_ns: float
    sequence_us: float
    kv_read_ns: float
    request_fixed_us: int = 0
    experts: int = 0
    top_k: int = 0
    kv_bytes_per_token: int
    kv_blocks_16: int
    evidence: Evidence = Evidence()

    def __post_init__(self) -> None:
        expected = "moe-sum" if self.experts else "max"
        if self.form != expected:
            raise ConfigError(
                f"preset {self.name!r} has form={self.form!r} with experts={self.experts}: a dense model's form is "
                "'max', a mixture of experts gives form='moe-sum', experts and top_k"
            )
        if self.kv_blocks_16 < 2:
            raise ConfigError(f"preset {self.name!r} has kv_blocks_16={self.kv_blocks_16}: give at least 2")
        _ = self.cost  # refuses coefficients that cannot be

    @property
    def cost(self) -> StepCost:
        """The coefficients; `dataclasses.replace(preset.cost, jitter=0.05)` varies them."""
        return StepCost(
            step_fixed_us=self.step_fixed_us,
            weight_read_us=self.weight_read_us,
            token_us=self.token_us,
            prefill_attention_ns=self.prefill_attention_ns,
            sequence_us=self.sequence_us,
            kv_read_ns=self.kv_read_ns,
            request_fixed_us=self.request_fixed_us,
            experts=self.experts,
            top_k=self.top_k,
        )

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of 16 tokens, null block included."""
        return self.kv_blocks_16

    def blocks_of(self, block_size: int) -> int:
        """Blocks of this size that the same KV memory holds, null block included."""
        return self.kv_blocks_16 * BLOCK_TOKENS // block_size


def preset_names() -> list[str]:
    return sorted(_read(_builtin(), _FILE))


def load_preset(name_or_path: str | Path) -> Preset:
    """A built-in preset by name, or the only one of a TOML file (`FILE.toml`), or one of several (`FILE.toml:NAME`)."""
    text = str(name_or_path)
    path, _, wanted = text.partition(".toml:")
    if wanted:
        path += ".toml"
    elif not text.endswith(".toml"):
        presets = _read(_builtin(), _FILE)
        if text not in presets:
            raise ConfigError(
                f"no preset named {text!r}: choose one of {', '.join(sorted(presets))}, or give a file ending in .toml"
            )
        return presets[text]
    try:
        presets = _read(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the preset file {path!r}: {error}") from error
    if not wanted and len(presets) == 1:
        return next(iter(presets.values()))
    if wanted not in presets:
        raise ConfigError(f"{path} holds {', '.join(sorted(presets))}: choose one as {path}:NAME")
    return presets[wanted]


def preset_toml(preset: Preset) -> str:
    """The preset as a `[[preset]]` table, in the form and order of presets.toml; absent evidence is left out."""
    lines = ["[[preset]]"]
    for name in Preset.__struct_fields__:
        value = getattr(preset, name)
        if name == "evidence" or (name in ("experts", "top_k") and not preset.experts):
            continue
        lines.append(f"{name} = {_toml(value)}")
    evidence = {name: value for name, value in msgspec.structs.asdict(preset.evidence).items() if value is not None}
    if evidence != {"measured_rows": 0}:
        lines.append("[preset.evidence]")
        lines += [f"{name} = {_toml(value)}" for name, value in evidence.items()]
    return "\n".join(lines) + "\n"


def _toml(value: str | float) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(int(value)) if value == int(value) else format(value, "f").rstrip("0")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    preset: list[Preset]


def _builtin() -> str:
    return resources.files(__package__ or "mock_engine").joinpath(_FILE).read_text(encoding="utf-8")


def _read(text: str, source: str) -> dict[str, Preset]:
    try:
        presets = msgspec.convert(tomllib.loads(text), _File).preset
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{source} is no preset file: {error}") from error
    found = {preset.name: preset for preset in presets}
    if not found or len(found) < len(presets):
        raise ConfigError(f"{source} holds no preset, or two of one name: give each [[preset]] its own name")
    return found
