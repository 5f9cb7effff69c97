"""One short text for what a table holds, so that run.json can say which rows its figures came from.

Not a byte of a file goes into it: two files with the same rows have the same digest, whatever library wrote them. A
column that holds nothing counts as not there, since a later version reads it where an earlier one wrote none. Cost is
that of reading each value once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pyarrow as pa

DIGEST_BYTES = 16


def digest(frame: pd.DataFrame) -> str:
    """Of a frame of one of the tables: its columns, their order, and every value in the order of the rows."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    found.update(f"{len(frame)}".encode())
    for name in frame.columns:
        array = pa.array(frame[name], from_pandas=True)
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if array.null_count < len(array):
            found.update(f"\n{name}\n".encode())
            for part in _parts(array):
                found.update(part)
    return f"blake2b:{found.hexdigest()}"


def _parts(array: pa.Array) -> Iterator[bytes | memoryview]:
    """Which values are known, how long each is where that differs, and the values without those that are not known."""
    yield np.packbits(np.asarray(array.is_valid())).tobytes()
    known = array.drop_null()
    if pa.types.is_list(known.type) or pa.types.is_large_list(known.type):
        yield np.asarray(known.value_lengths(), dtype="<i8").tobytes()
        known = known.flatten()
    if pa.types.is_string(known.type) or pa.types.is_large_string(known.type):
        raw = known.cast(pa.large_binary())
        ends = np.frombuffer(raw.buffers()[1], dtype="<i8")[raw.offset : raw.offset + len(raw) + 1]
        yield np.diff(ends).tobytes()
        yield memoryview(raw.buffers()[2] or b"")[ends[0] : ends[-1]] if len(raw) else b""
        return
    yield np.asarray(known, dtype="<f8" if pa.types.is_floating(known.type) else "<i8").tobytes()
