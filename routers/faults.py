"""Ways in which routers in the field misread what they route, as switches that are off unless asked for.

The request itself always goes on unharmed; what is harmed is the router's idea of it. The live router commits these on
the real bytes; `faulty_prompt` does the same to a prompt that is only symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from routers.errors import OptionError
from routers.hashing import LOCAL_SEED, MASK
from routers.prompts import Hashes, Prompt

BYTES_PER_TOKEN = 6
"""Of a prompt of token ids on the wire: five digits and a comma."""


class RouterFaults(msgspec.Struct, frozen=True, kw_only=True):
    body_truncate_bytes: int | None = None
    """Only the first so many bytes of a body are looked at, so a long prompt is scored on its beginning."""
    template_mismatch: bool = False
    """A chat is tokenised as its plain text, without the engine's template, so no block ever matches."""
    ignore_extra_keys: bool = False
    """Salts and other extra keys of blocks are not looked at, so one tenant's blocks look like another's."""
    ignore_event_sequence: bool = False
    """Numbers of KV event batches and lost connections mean nothing, so what is believed of a replica outlives its
    restart and every hole (field case BL-08)."""
    untracked_load: bool = False
    """The policy places requests and nobody counts them, so every replica looks idle to it: counts in flight, what
    policies book themselves and what peers tell are nothing. What it believes of caches and sessions from what
    it placed goes on, and so do gauges that engines tell (field case BL-04: an endpoint that is only proxied)."""
    breaker_on_client_errors: int | None = None
    """So many error answers in a row, a client's own (4xx) among them, and a replica is left out for a minute, as if
    it had failed (field case BL-43)."""

    def __post_init__(self) -> None:
        if self.body_truncate_bytes is not None and self.body_truncate_bytes < 1:
            raise OptionError(f"body_truncate_bytes={self.body_truncate_bytes} leaves nothing to read: give at least 1")
        if self.breaker_on_client_errors is not None and self.breaker_on_client_errors < 1:
            raise OptionError(f"breaker_on_client_errors={self.breaker_on_client_errors} never closes: give at least 1")

    def __bool__(self) -> bool:
        return self != NO_FAULTS

    def names(self) -> list[str]:
        """Those that are on, as they are asked for."""
        on = []
        for name, value in msgspec.structs.asdict(self).items():
            if value not in (None, False):
                flag = name.replace("_", "-")
                on.append(flag if value is True else f"{flag}={value}")
        return on


NO_FAULTS = RouterFaults()


_NUMBERS = {"body-truncate-bytes": 65_536, "breaker-on-client-errors": 10}  # with an example each
_SWITCHES = ("template-mismatch", "ignore-extra-keys", "ignore-event-sequence", "untracked-load")
FAULTS = (*(f"{name}=N" for name in _NUMBERS), *_SWITCHES)
"""How faults are asked for."""


def parse_faults(texts: Sequence[str]) -> RouterFaults:
    """`NAME` or `NAME=VALUE`, as `--fault` takes them."""
    found: dict[str, int | bool] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if name in _NUMBERS:
            if not value.isdigit():
                raise OptionError(f"--fault {text!r} lacks its number: write {name}={_NUMBERS[name]}")
            found[name.replace("-", "_")] = int(value)
        elif name in _SWITCHES:
            if separator:
                raise OptionError(f"--fault {text!r} takes no value: write {name}")
            found[name.replace("-", "_")] = True
        else:
            raise OptionError(f"no fault named {name!r}: choose from {', '.join(FAULTS)}")
    return RouterFaults(**found)  # type: ignore[arg-type]


def faulty_prompt(prompt: Prompt, faults: RouterFaults) -> Prompt:
    """The prompt as a router with these faults sees it."""
    if faults.body_truncate_bytes is not None:
        kept = faults.body_truncate_bytes // BYTES_PER_TOKEN
        if kept < prompt.tokens:
            prompt = CutPrompt(prompt, kept, faults.body_truncate_bytes)
    if faults.template_mismatch:
        prompt = OtherTemplatePrompt(prompt)
    return prompt


class CutPrompt:
    """The beginning of a prompt."""

    def __init__(self, prompt: Prompt, tokens: int, chars: int) -> None:
        self._prompt = prompt
        self._tokens = tokens
        self._chars = chars

    @property
    def tokens(self) -> int:
        return self._tokens

    def block_hashes(self, block_size: int) -> Hashes:
        return self._prompt.block_hashes(block_size)[: self._tokens // block_size]

    def token_ids(self) -> Sequence[int]:
        return self._prompt.token_ids()[: self._tokens]

    def text(self) -> str | None:
        text = self._prompt.text()
        return text[: self._chars] if text is not None else None


class OtherTemplatePrompt:
    """A prompt whose tokens are not the engine's: as long, as alike to one another, and no block is the same."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    @property
    def tokens(self) -> int:
        return self._prompt.tokens

    def block_hashes(self, block_size: int) -> Hashes:
        return [(int(value) + LOCAL_SEED) & MASK for value in self._prompt.block_hashes(block_size)]

    def token_ids(self) -> Sequence[int]:
        return [token + 1 for token in self._prompt.token_ids()]

    def text(self) -> str | None:
        return self._prompt.text()
