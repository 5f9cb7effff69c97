"""Everything that the engine core raises on purpose.

MockEngineError
├── ConfigError     (ValueError)  an engine option or a preset that cannot work; says what to change
├── EngineError     (RuntimeError) the caller broke the engine's contract, for example let time run backwards
├── StuckError      (RuntimeError) steps went by, and no request got any further
└── RequestError    a request that the engine refuses, in the words of the HTTP contract
"""


class MockEngineError(Exception):
    """Root of the tree."""


class ConfigError(MockEngineError, ValueError):
    """An option's value cannot work, alone or together with another."""


class EngineError(MockEngineError, RuntimeError):
    """A call that no correct driver makes."""


class StuckError(MockEngineError, RuntimeError):
    """An engine that runs and gets nowhere; says which requests wait for how many blocks."""


class RequestError(MockEngineError):
    """A refused request; the four fields are those of the error body that a vLLM client receives."""

    def __init__(self, status: int, message: str, type: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
