"""A mock vLLM replica. This package exports its pure core: no socket, no clock, nothing is opened by importing it."""

from mock_engine.config import DEFAULT_BLOCK_SIZE, HASH_ALGORITHMS, EngineConfig
from mock_engine.cost_model import Batch, StepCost
from mock_engine.engine import Engine
from mock_engine.errors import ConfigError, EngineError, MockEngineError, RequestError, StuckError
from mock_engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from mock_engine.faults import FaultPlan, Faults, parse_faults
from mock_engine.generate import FIRST_TOKEN_ID, TOKEN_RANGE, generated_token_ids, token_range
from mock_engine.hashing import BlockHasher, Lora
from mock_engine.presets import Preset, load_preset, preset_names
from mock_engine.request import Request, RunSequence, TokenSequence
from mock_engine.results import Admission, Finish, Run, Snapshot, Step
from mock_engine.wire import encode_batch

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "FIRST_TOKEN_ID",
    "HASH_ALGORITHMS",
    "TOKEN_RANGE",
    "Admission",
    "AllBlocksCleared",
    "Batch",
    "BlockHasher",
    "BlockRemoved",
    "BlockStored",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "FaultPlan",
    "Faults",
    "Finish",
    "KvEvent",
    "Lora",
    "MockEngineError",
    "Preset",
    "Request",
    "RequestError",
    "Run",
    "RunSequence",
    "Snapshot",
    "Step",
    "StepCost",
    "StuckError",
    "TokenSequence",
    "encode_batch",
    "generated_token_ids",
    "load_preset",
    "parse_faults",
    "preset_names",
    "token_range",
]
