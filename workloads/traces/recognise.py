"""The forms by name, and which of them a file has, told from its first line or document."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from workloads.errors import TraceError
from workloads.traces.bailian import Bailian
from workloads.traces.files import documents, lines
from workloads.traces.forms import DocumentForm, LineForm
from workloads.traces.mooncake import Mooncake
from workloads.traces.otel import Otel
from workloads.traces.recorded import Recorded
from workloads.traces.sharegpt import ShareGpt
from workloads.traces.tables import Azure, BurstGpt
from workloads.traces.weka import Weka

TRACE_FORMATS: dict[str, Callable[[], LineForm | DocumentForm]] = {
    "azure": Azure,
    "burstgpt": BurstGpt,
    "dynamo": lambda: Mooncake("dynamo"),
    "dynamo-request-trace": Recorded,
    "mooncake": Mooncake,
    "mooncake-delta": lambda: Mooncake("mooncake-delta", delta=True),
    "otel": Otel,
    "qwen-bailian": Bailian,
    "sharegpt": ShareGpt,
    "weka": Weka,
}

PEEKED_LINES = 200
"""So many lines decide what a file is, and whether its lines share sessions."""
_DYNAMO_KEYS = {"branches", "policy_class", "prefix_reset", "priority", "tool_events", "tool_wait_ms", "wait_for"}


def recognise(path: Path) -> str:
    """The form of a file. Raises TraceError when it is none of ours."""
    first = next(lines(path), None)
    if first is None:
        raise TraceError(str(path), "the file is empty: give one that holds a trace")
    _, number, line = first
    if line[:1] in (b"{", b"["):
        name = _of_json(path, line)
    else:
        name = _of_table(line.decode("utf-8", "replace"))
    if name is None:
        raise TraceError(
            f"{path}:{number}",
            "this is no form that we know by its looks: name it with workload.format (--format on the command line), "
            f"one of {', '.join(sorted(TRACE_FORMATS))}",
        )
    return name


def _of_json(path: Path, line: bytes) -> str | None:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):  # also bytes that are no text; whoever reads on says where
        value = None
    if not isinstance(value, dict):
        value = next((document for _, document in documents(path)), None)
    if not isinstance(value, dict):
        return None
    keys = set(value)
    if str(value.get("schema", "")).startswith("dynamo.request.trace") or "event" in keys:
        return "dynamo-request-trace"
    if "chat_id" in keys:
        return "qwen-bailian"
    if "conversations" in keys:
        return "sharegpt"
    if "spans" in keys:
        return "otel"
    if isinstance(value.get("requests"), list):
        return "weka"
    if keys & (_DYNAMO_KEYS | {"input_length", "input_tokens", "hash_ids"}):
        return "dynamo" if _has_dynamo_keys(path) else "mooncake"
    return None


def _has_dynamo_keys(path: Path) -> bool:
    """Both names mean the same loader; the first lines tell which writer it was."""
    marks = [f'"{key}"'.encode() for key in sorted(_DYNAMO_KEYS)]
    return any(mark in line for _, _, line in islice(lines(path), PEEKED_LINES) for mark in marks)


def _of_table(line: str) -> str | None:
    cells = [cell.strip().lower() for cell in line.split(",")]
    if "contexttokens" in cells:
        return "azure"
    if "request tokens" in cells:
        return "burstgpt"
    if len(cells) == 3 and cells[0][:2].isdigit() and ":" in cells[0]:
        return "azure"
    if len(cells) == 6 and cells[0].replace(".", "", 1).isdigit() and ("gpt" in cells[1]):
        return "burstgpt"
    return None
