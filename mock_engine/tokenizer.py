"""Text to token ids and back, offline.

`WordTokenizer` is the default and needs no file: every generated id has a word of its own (a space and three
syllables), any other text is one token a byte, and role marks are single reserved ids. So any text comes back
exactly, the ids of a text never change when more text follows (unless the cut goes through such a word), and an
answer that a client sends back as text has the very ids that were generated: its blocks are found again.
`FileTokenizer` wraps a `tokenizer.json`; there, answers are drawn from those ids whose text maps back to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from mock_engine.errors import ConfigError, RequestError
from mock_engine.generate import FIRST_TOKEN_ID, TOKEN_RANGE, generated_token_ids

SPECIALS = {
    "<|pad|>": 0,
    "<|bos|>": 1,
    "<|eos|>": 2,
    "<|im_start|>": 3,
    "<|im_end|>": 4,
    "<|sep|>": 5,
    "<|system|>": 6,
    "<|developer|>": 7,
    "<|user|>": 8,
    "<|assistant|>": 9,
    "<|tool|>": 10,
    "<|end|>": 11,
}
FIRST_BYTE_ID = 100  # ids 100..355 are the bytes 0..255
GENERATED_CHUNK = 128  # output ids are made this many at a time
SAFE_IDS_MAX = 4096  # a real vocabulary's answers are drawn from at most so many ids
SAFE_IDS_MIN = 64  # with fewer than this, answers would be too alike: draw from the whole vocabulary instead
BUNDLED = "bundled"
BUNDLED_FOLDER = Path(__file__).parent / "vocabulary" / "bpe-8k"
REPLACEMENT = "�"

_CONSONANTS, _VOWELS = "bdgklmnt", "aeio"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]  # 32, so 32768 words
_WORD = rf" (?:[{_CONSONANTS}][{_VOWELS}]){{3}}"


class Decoder(Protocol):
    """Turns the ids of one answer into text as they come; a piece may be empty while a character is incomplete."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    vocab_size: int
    eos_token_id: int | None
    chat_template: str | None  # a template that belongs to these ids, or None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int]]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def token_strs(self, token_ids: Sequence[int]) -> list[str]: ...

    def decoder(self, skip_special_tokens: bool = True) -> Decoder: ...

    def answer(self, seed: int) -> int | Callable[[int], int]:
        """What a TokenSequence takes as its output: the seed itself, or a function from position to id."""
        ...


def word(token_id: int) -> str:
    """The text of a generated id of the default vocabulary."""
    at = token_id - FIRST_TOKEN_ID
    return f" {_SYLLABLES[at >> 10]}{_SYLLABLES[(at >> 5) & 31]}{_SYLLABLES[at & 31]}"


class MappedAnswer:
    """The documented function of a seed, folded into a choice of ids; made some positions at a time."""

    __slots__ = ("_choice", "_ids", "_seed")

    def __init__(self, seed: int, choice: Sequence[int]) -> None:
        self._seed = seed
        self._choice = choice
        self._ids: list[int] = []

    def __call__(self, position: int) -> int:
        ids, choice = self._ids, self._choice
        while position >= len(ids):
            made = generated_token_ids(self._seed, len(ids), GENERATED_CHUNK)
            ids.extend(choice[token_id % len(choice)] for token_id in made)
        return ids[position]


class WordTokenizer:
    vocab_size = FIRST_TOKEN_ID + TOKEN_RANGE
    eos_token_id: int | None = SPECIALS["<|eos|>"]
    chat_template: str | None = None

    def __init__(self) -> None:
        self._special_texts = {token_id: text for text, token_id in SPECIALS.items()}
        self._words = [word(token_id) for token_id in range(FIRST_TOKEN_ID, self.vocab_size)]
        self._ids = {text: FIRST_TOKEN_ID + at for at, text in enumerate(self._words)}
        self._ids.update(SPECIALS)
        self._pieces = re.compile("|".join([*map(re.escape, SPECIALS), _WORD]))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for piece, token_id in self._split(text):
            if token_id is None:
                ids.extend(byte + FIRST_BYTE_ID for byte in piece.encode("utf-8", "surrogatepass"))
            else:
                ids.append(token_id)
        return ids

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        start = 0
        for piece, token_id in self._split(text):
            if token_id is None:
                for at, character in enumerate(piece, start):
                    spans.extend([(at, at + 1)] * len(character.encode("utf-8", "surrogatepass")))
            else:
                spans.append((start, start + len(piece)))
            start += len(piece)
        return spans

    def _split(self, text: str) -> Iterable[tuple[str, int | None]]:
        start = 0
        for match in self._pieces.finditer(text):
            token_id = self._ids.get(match.group())
            if token_id is None:  # three syllables beyond the last word: plain text
                continue
            if match.start() > start:
                yield text[start : match.start()], None
            yield match.group(), token_id
            start = match.end()
        if start < len(text):
            yield text[start:], None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        decoder = self.decoder(skip_special_tokens)
        return "".join([*map(decoder.push, token_ids), decoder.flush()])

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        return [self._token_str(token_id) for token_id in token_ids]

    def _token_str(self, token_id: int) -> str:
        byte = token_id - FIRST_BYTE_ID
        if 0 <= byte < 256:
            return chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>"
        return self.text_of(token_id) or ""

    def text_of(self, token_id: int) -> str | None:
        """The text of a word or a special token; None for a byte or an unknown id."""
        at = token_id - FIRST_TOKEN_ID
        if 0 <= at < TOKEN_RANGE:
            return self._words[at]
        return self._special_texts.get(token_id)

    def decoder(self, skip_special_tokens: bool = True) -> Decoder:
        return _WordDecoder(self, skip_special_tokens)

    def answer(self, seed: int) -> int | Callable[[int], int]:
        return seed


class _WordDecoder:
    __slots__ = ("_bytes", "_skip", "_tokenizer", "_words")

    def __init__(self, tokenizer: WordTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._words = tokenizer._words
        self._skip = skip_special_tokens
        self._bytes = b""

    def push(self, token_id: int) -> str:
        if token_id >= FIRST_TOKEN_ID and not self._bytes and token_id < WordTokenizer.vocab_size:
            return self._words[token_id - FIRST_TOKEN_ID]
        byte = token_id - FIRST_BYTE_ID
        if 0 <= byte < 256:
            self._bytes += bytes((byte,))
            return self._complete()
        text = self._tokenizer.text_of(token_id) or ""
        return self.flush() + ("" if self._skip and token_id < FIRST_BYTE_ID else text)

    def flush(self) -> str:
        held, self._bytes = self._bytes, b""
        return _decode_bytes(held)

    def _complete(self) -> str:
        """Text up to the last character that is whole; the bytes of a begun one stay."""
        data = self._bytes
        for size in range(1, min(4, len(data)) + 1):
            lead = data[-size]
            if lead & 0xC0 == 0x80:
                continue
            needed = 1 if lead < 0x80 else 2 if lead >> 5 == 0b110 else 3 if lead >> 4 == 0b1110 else 4
            if needed > size and lead >= 0xC0 and lead < 0xF8:
                self._bytes = data[-size:]
                return _decode_bytes(data[:-size])
            break
        self._bytes = b""
        return _decode_bytes(data)


def _decode_bytes(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


class FileTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        import tokenizers  # not needed, and not loaded, with the default vocabulary

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a missing or a malformed file
            raise ConfigError(
                f"--tokenizer {path}: {error}; give a tokenizer.json of the Hugging Face form, or its folder"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        settings = _settings(file.parent / "tokenizer_config.json")
        self.eos_token_id = self._eos(settings)
        template_file = file.parent / "chat_template.jinja"
        self.chat_template: str | None = None
        if path.is_dir() and template_file.is_file():
            self.chat_template = template_file.read_text(encoding="utf-8")
        elif isinstance(settings.get("chat_template"), str):
            self.chat_template = str(settings["chat_template"])
        self._safe_ids: list[int] | None = None

    def _eos(self, settings: dict[str, object]) -> int | None:
        token = settings.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        return self._tokenizer.token_to_id(token) if isinstance(token, str) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        return list(self._encoding(text, add_special_tokens).offsets)

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # half of a surrogate pair, which the library takes for no text at all
            raise RequestError(400, f"The text cannot be tokenised: {error}.") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        known = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def decoder(self, skip_special_tokens: bool = True) -> Decoder:
        return _FileDecoder(self, skip_special_tokens)

    def answer(self, seed: int) -> int | Callable[[int], int]:
        if self._safe_ids is None:
            self._safe_ids = self._find_safe_ids()
        return MappedAnswer(seed, self._safe_ids) if self._safe_ids else seed

    def _find_safe_ids(self) -> list[int]:
        """Ids that are a whole word with its leading space and come back as themselves, alone and in company.

        A pre-tokenizer that splits at spaces never joins two such words, so any sequence of them maps back.
        """
        texts = [(token_id, self.decode([token_id])) for token_id in range(self.vocab_size)]
        candidates = [(token_id, text) for token_id, text in texts if re.fullmatch(r" [A-Za-z]+", text)]
        candidates = candidates[:SAFE_IDS_MAX]
        encoded = self._tokenizer.encode_batch([text * 2 for _, text in candidates], add_special_tokens=False)
        safe = [token_id for (token_id, _), got in zip(candidates, encoded, strict=True) if got.ids == [token_id] * 2]
        return safe if len(safe) >= SAFE_IDS_MIN else []


class _FileDecoder:
    """Decodes a window of recent ids and gives what is new, so that spaces and split characters come out right."""

    __slots__ = ("_ids", "_prefix", "_read", "_skip", "_tokenizer")

    def __init__(self, tokenizer: FileTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._prefix = 0  # the window starts here
        self._read = 0  # ids before this one have been given out

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        window = self._ids[self._prefix :]
        before = self._tokenizer.decode(window[: self._read - self._prefix], self._skip)
        text = self._tokenizer.decode(window, self._skip)
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and not final):
            return ""
        self._prefix = self._read
        self._read = len(self._ids)
        return text[len(before) :]


def _settings(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no valid JSON ({error}): mend or remove it") from error
    return settings if isinstance(settings, dict) else {}


def load_tokenizer(path: str | None) -> Tokenizer:
    """The default without a path; BUNDLED names the small real vocabulary that comes with this package."""
    if not path:
        return WordTokenizer()
    return FileTokenizer(BUNDLED_FOLDER if path == BUNDLED else Path(path))
