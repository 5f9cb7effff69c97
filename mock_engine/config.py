"""Options of one engine, under vLLM's names, each default written here and nowhere else.

A config that could never run is refused when it is made, with the mend. What only a mock has (presets, seeds,
logs) is no engine option and lives in the shell.
"""

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from mock_engine.errors import ConfigError

HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SCHEDULING_POLICIES = ("fcfs", "priority")
DEFAULT_BLOCK_SIZE = 16
TOKENS_MAX = 2**31 - 1  # or requests
BLOCKS_MAX = 10_000_000  # a thousand times what a large GPU holds


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are vLLM's on an H100, where vLLM has one (contract, section F)."""

    block_size: int = DEFAULT_BLOCK_SIZE
    num_gpu_blocks: int = 28_200  # the null block included, as vLLM counts; this many fit an 8B on an H100
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    watermark: float = 0.0  # share of all blocks that an admission leaves free while something runs
    long_prefill_token_threshold: int = 0  # 0: no limit
    scheduling_policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} schedules nothing: give at least 1")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) > TOKENS_MAX:
                raise ConfigError(f"{name}={getattr(self, name)} is beyond all use: give at most {TOKENS_MAX}")
        if self.num_gpu_blocks < 2:
            raise ConfigError(
                f"num_gpu_blocks={self.num_gpu_blocks} leaves no block for a request, because one is the null block: "
                "give at least 2"
            )
        if self.num_gpu_blocks > BLOCKS_MAX:
            raise ConfigError(
                f"num_gpu_blocks={self.num_gpu_blocks} is more than this machine could keep account of: give at most "
                f"{BLOCKS_MAX}"
            )
        if self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len={self.max_model_len} has no room for a prompt and an answer: give at least 2"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark={self.watermark} is no share of the blocks: give a number from 0 to below 1")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} is negative: give 0 for no limit"
            )
        _choose("prefix_caching_hash_algo", self.prefix_caching_hash_algo, HASH_ALGORITHMS)
        _choose("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.num_gpu_blocks - 1

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_gpu_blocks)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """A config from a parsed file; an unknown key or a wrong type is a ConfigError that names the key."""
        unknown = sorted(set(options) - set(cls.__struct_fields__))
        if unknown:
            raise ConfigError(
                f"no engine option named {unknown[0]!r}: choose one of {', '.join(sorted(cls.__struct_fields__))}"
            )
        try:
            return msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine options: {error}") from error


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}")
