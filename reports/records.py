"""The tables of a run, requests and samples of replicas and of routers: columns, frames and parquet files of them.

The column lists are the contract with whoever records a run; order, names and types live here only. A row may leave
out what is not known, and unknown is null, never 0; a key that is not a column is an error. Files carry a fixed
schema and fixed metadata, so the decoded rows of two runs with the same numbers are the same; a column that an earlier
version did not write is read as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reports.errors import RecordError

TEXT, WHOLE, REAL, GAPS = "string", "Int64", "Float64", "list<int64>"

REQUEST_COLUMNS: dict[str, str] = {
    "router": TEXT,
    "repeat": WHOLE,
    "ingress": TEXT,
    "request_id": TEXT,
    "session": TEXT,
    "turn": WHOLE,
    "group": TEXT,
    "rollout_step": WHOLE,
    "replica": TEXT,
    "reason": TEXT,
    "ready_us": WHOLE,
    "scheduled_us": WHOLE,
    "sent_us": WHOLE,
    "routed_us": WHOLE,
    "admitted_us": WHOLE,
    "first_token_us": WHOLE,
    "second_token_us": WHOLE,
    "first_content_us": WHOLE,
    "last_token_us": WHOLE,
    "end_us": WHOLE,
    "phase": TEXT,
    "prompt_tokens": WHOLE,
    "output_tokens": WHOLE,
    "first_chunk_tokens": WHOLE,
    "cached_tokens": WHOLE,
    "token_source": TEXT,
    "believed_hit_tokens": WHOLE,
    "chunk_gaps_us": GAPS,
    "status": TEXT,
    "error_class": TEXT,
    "error": TEXT,
}
FLEET_COLUMNS: dict[str, str] = {
    "router": TEXT,
    "repeat": WHOLE,
    "t_us": WHOLE,
    "replica": TEXT,
    "running": WHOLE,
    "waiting": WHOLE,
    "used_blocks": WHOLE,
    "active_decode_blocks": WHOLE,
    "hit_tokens": WHOLE,
    "query_tokens": WHOLE,
    "evicted_blocks": WHOLE,
    "preemptions": WHOLE,
    "step_us_mean": REAL,
    "late_us_p99": REAL,
}
ROUTER_COLUMNS: dict[str, str] = {
    "router": TEXT,
    "repeat": WHOLE,
    "ingress": TEXT,
    "t_us": WHOLE,
    "index_size": WHOLE,
    "in_flight": WHOLE,
}
REQUEST_REQUIRED = ("router", "repeat", "request_id", "phase", "status")
FLEET_REQUIRED = ("router", "repeat", "t_us", "replica")
ROUTER_REQUIRED = ("router", "repeat", "ingress", "t_us")
STATUSES = ("ok", "error", "incomplete", "cancelled")  # cancelled: cut by the load generator at the run's end
OFF_RATE = "off-rate"  # phase of requests of a stage that was not sent at its rate
IN_ORDER = ("sent_us", "first_token_us", "second_token_us", "last_token_us", "end_us")
"""What the load generator saw of a request by its one clock, so none of these is before another to its left."""
PHASES = ("warmup", "steady", "cooldown", OFF_RATE)
FLEET_BIN_US = 500_000
WHOLE_MAX = 1 << 53  # beyond, sums and means would not be exact
REPEATS_MAX = 1 << 20
STEPS_MAX = 1 << 32  # with these two, a repeat and a step or a session fit into one number

_ARROW = {TEXT: pa.string(), WHOLE: pa.int64(), REAL: pa.float64(), GAPS: pa.list_(pa.int64())}
_PANDAS = {
    _ARROW[TEXT]: pd.StringDtype("pyarrow"),
    _ARROW[WHOLE]: pd.Int64Dtype(),
    _ARROW[REAL]: pd.Float64Dtype(),
    _ARROW[GAPS]: pd.ArrowDtype(_ARROW[GAPS]),
}
# What pandas itself would write into the file, with the version pinned: `pandas.read_parquet` then restores nullable
# whole numbers, and the metadata does not change with the library that wrote it.
_NAMES_FOR_PANDAS = {
    TEXT: ("unicode", "string"),
    WHOLE: ("int64", "Int64"),
    REAL: ("float64", "Float64"),
    GAPS: ("list[int64]", "object"),
}
_PANDAS_METADATA_VERSION = "2.2.0"


Table = Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]] | pd.DataFrame  # rows, or whole columns


def requests_frame(rows: Table) -> pd.DataFrame:
    """Rows, or whole columns of equal length, in the order given; `repeat` counts from 0."""
    frame = _frame(rows, REQUEST_COLUMNS, REQUEST_REQUIRED, "request")
    _check_words(frame, "status", STATUSES)
    _check_words(frame, "phase", PHASES)
    return _counted(frame, repeat=REPEATS_MAX, rollout_step=STEPS_MAX)


def fleet_frame(rows: Table) -> pd.DataFrame:
    """Samples of replicas; hits, queries, evictions and preemptions count up since the replica's start."""
    return _counted(_frame(rows, FLEET_COLUMNS, FLEET_REQUIRED, "fleet"), repeat=REPEATS_MAX)


def router_frame(rows: Table) -> pd.DataFrame:
    """Samples of router processes, one an ingress: entries that its index of prefixes holds, null where it keeps none,
    and requests that it counts as under way."""
    return _counted(_frame(rows, ROUTER_COLUMNS, ROUTER_REQUIRED, "router sample"), repeat=REPEATS_MAX)


def read_json_lines(path: Path | str) -> list[dict[str, Any]]:
    """Every whole line of a file that may still be growing or whose writer was killed.

    A last line that is cut is left out; a broken line before it is an error, since something else went wrong there.
    """
    lines = Path(path).read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise RecordError(
                f"{path}:{number}: not a JSON object ({error}): the file was edited or mixed with another; "
                "restore or delete it"
            ) from error
        if not isinstance(row, dict):
            if number == len(lines):
                break
            raise RecordError(
                f"{path}:{number}: {type(row).__name__} where an object was expected: one JSON object a line"
            )
        rows.append(row)
    return rows


def write_parquet(frame: pd.DataFrame, path: Path | str) -> None:
    """Writes a frame of one of the tables. No time of writing and no library version goes into the metadata."""
    columns = next((columns for columns, _, _ in _TABLES if list(frame.columns) == list(columns)), None)
    if columns is None:
        raise RecordError(
            f"columns {', '.join(map(str, frame.columns))}: make the frame with requests_frame, fleet_frame or "
            "router_frame"
        )
    table = pa.table(
        [pa.array(frame[name], type=_ARROW[kind]) for name, kind in columns.items()], schema=_schema(columns)
    )
    pq.write_table(table, path, compression="zstd", row_group_size=1 << 18)


def read_parquet(path: Path | str) -> pd.DataFrame:
    """A frame as `requests_frame`, `fleet_frame` or `router_frame` gave it."""
    if not Path(path).is_file():
        raise RecordError(f"{path}: is not there or no file: restore it, or run it again")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise RecordError(
            f"{path}: cannot be read as parquet ({_first_line(error)}): the run was killed while writing it, or "
            "the file was changed; restore it, or run it again"
        ) from error
    names = table.column_names
    for columns, required, frame_of in _TABLES:
        if set(required) <= set(names) <= set(columns) and len(set(names)) == len(names):
            try:
                return frame_of({name: table[name] for name in names})
            except RecordError as error:
                raise RecordError(f"{path}: {error}") from error
    columns, required, _ = max(_TABLES, key=lambda table: len(set(table[0]) & set(names)))
    gone = [f"no column {name!r}" for name in required if name not in names]
    strange = [f"a column {name!r} that is not in the contract" for name in names if name not in columns]
    raise RecordError(
        f"{path}: {', '.join((gone + strange)[:2]) or 'a column twice'}: restore the file, or run it again"
    )


_TABLES: tuple[tuple[dict[str, str], tuple[str, ...], Callable[[Table], pd.DataFrame]], ...] = (
    (REQUEST_COLUMNS, REQUEST_REQUIRED, requests_frame),
    (FLEET_COLUMNS, FLEET_REQUIRED, fleet_frame),
    (ROUTER_COLUMNS, ROUTER_REQUIRED, router_frame),
)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _schema(columns: Mapping[str, str]) -> pa.Schema:
    described = [
        {"name": name, "field_name": name, "pandas_type": kinds[0], "numpy_type": kinds[1], "metadata": None}
        for name, kinds in ((name, _NAMES_FOR_PANDAS[kind]) for name, kind in columns.items())
    ]
    metadata = {
        "index_columns": [],
        "column_indexes": [],
        "columns": described,
        "creator": {"library": "pyarrow", "version": "0"},
        "pandas_version": _PANDAS_METADATA_VERSION,
    }
    return pa.schema(
        [(name, _ARROW[kind]) for name, kind in columns.items()], metadata={"pandas": json.dumps(metadata)}
    )


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    return table.replace_schema_metadata(None).to_pandas(types_mapper=_PANDAS.get)


def _array(values: Any, kind: str) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if kind == GAPS:
        gaps = pa.array(values, type=_ARROW[kind], from_pandas=True)
        if gaps.flatten().null_count:
            raise pa.ArrowInvalid("found a list with a null in it")
        return gaps
    if kind != WHOLE:
        return pa.array(values, type=_ARROW[kind], from_pandas=True)
    given = pa.array(values, from_pandas=True)
    if not (pa.types.is_integer(given.type) or pa.types.is_floating(given.type) or pa.types.is_null(given.type)):
        raise pa.ArrowTypeError(f"found {given.type}")
    whole = given.cast(pa.int64())  # refuses a fraction, where making it whole at once would cut it off
    bounds = pc.min_max(whole)
    if max(abs(bounds["min"].as_py() or 0), abs(bounds["max"].as_py() or 0)) > WHOLE_MAX:
        raise pa.ArrowInvalid(f"found {bounds['min']} to {bounds['max']}, beyond 2**53, which nothing in a run reaches")
    return whole


def _frame(rows: Any, columns: dict[str, str], required: tuple[str, ...], what: str) -> pd.DataFrame:
    if isinstance(rows, pd.DataFrame):
        if list(rows.columns) == list(columns) and all(
            str(rows[name].dtype) == str(_PANDAS[_ARROW[kind]]) for name, kind in columns.items()
        ):
            return rows.reset_index(drop=True)
        rows = {str(name): rows[name] for name in rows.columns}
    given = rows if isinstance(rows, Mapping) else _columns_of(list(rows), columns, what)
    unknown = [name for name in given if name not in columns]
    if unknown:
        raise RecordError(
            f"{what} column {unknown[0]!r} is not in the contract: leave it out, or use one of {', '.join(columns)}"
        )
    length = max((len(values) for values in given.values()), default=0)
    arrays = []
    for name, kind in columns.items():
        values = given.get(name)
        if values is None:
            arrays.append(pa.nulls(length, _ARROW[kind]))
            continue
        try:
            array = _array(values, kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
            raise RecordError(f"{what} column {name!r} must hold {kind}: {error}") from error
        arrays.append(array)
        if len(array) != length:
            raise RecordError(
                f"{what} column {name!r} has {len(array)} values and another {length}: give every column "
                "the same length"
            )
    table = pa.table(arrays, schema=pa.schema([(name, _ARROW[kind]) for name, kind in columns.items()]))
    for name in required:
        if table[name].null_count:
            raise RecordError(f"{what} row without {name!r}: every row needs {', '.join(required)}")
    return _to_pandas(table)


def _columns_of(rows: list[Mapping[str, Any]], columns: Mapping[str, str], what: str) -> dict[str, list[Any]]:
    for row in rows:
        if not row.keys() <= columns.keys():
            unknown = next(name for name in row if name not in columns)
            raise RecordError(
                f"{what} row with unknown key {unknown!r}: leave it out, or use one of {', '.join(columns)}"
            )
    return {name: [row.get(name) for row in rows] for name in columns}


def _check_words(frame: pd.DataFrame, column: str, words: tuple[str, ...]) -> None:
    strange = [word for word in frame[column].unique() if word not in words]
    if strange:
        raise RecordError(f"{column} {strange[0]!r} is not known: use one of {', '.join(words)}")


def check_order(frame: pd.DataFrame) -> None:
    """Refuses a request that ended before it began, as only a changed file has it; instants that nobody knows are
    passed over. Raises RecordError."""
    latest, before = np.full(len(frame), -WHOLE_MAX), np.full(len(frame), "", dtype=object)
    for name in IN_ORDER:
        instants = frame[name].to_numpy(dtype=np.int64, na_value=WHOLE_MAX)
        known = instants < WHOLE_MAX
        if (wrong := known & (instants < latest)).any():
            row = int(np.argmax(wrong))
            raise RecordError(
                f"request {frame['request_id'].iloc[row]!r} has {name} {instants[row]:,} before {before[row]} "
                f"{latest[row]:,}: nothing ends before it begins; restore the file, or run it again"
            )
        latest, before[known] = np.where(known, instants, latest), name


def _counted(frame: pd.DataFrame, **bounds: int) -> pd.DataFrame:
    """Numbers that count from 0 and stay below a bound."""
    for name, bound in bounds.items():
        known = frame[name].dropna()
        if len(known) and (known.min() < 0 or known.max() >= bound):
            raise RecordError(
                f"column {name!r} has {known.min()} to {known.max()} where it counts from 0 and stays below {bound:,}: "
                "number them anew"
            )
    return frame
