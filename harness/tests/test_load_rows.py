"""Rows of the load generator: what the disk does not take is a fact, not an exception inside a request."""

import os
import sys
from pathlib import Path

import pytest

from harness.json_lines import read_json_lines
from harness.load_rows import Row, RowFiles


def row(**fields) -> Row:
    given = {"request_id": "s-0", "session": "s", "turn": 0, "group": None, "rollout_step": None, "phase": "steady"}
    return Row(**{**given, "api": "completions-ids", "sent_us": 1, "status": "ok", **fields})


def test_every_row_is_out_before_the_call_returns(tmp_path):
    files = RowFiles(tmp_path, pid=7)
    files.row(row())
    assert [line["request_id"] for line in read_json_lines([files.rows_path])] == ["s-0"]
    assert files.counts["ok"] == 1
    assert files.failure is None
    files.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_remembered_and_breaks_nothing_off(tmp_path):
    files = RowFiles(tmp_path, pid=7)
    files._rows.close()
    files._rows = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - closed with the files
    files.row(row())
    assert files.failure is not None
    assert os.strerror(28) in files.failure or sys.platform != "linux"
    assert files.counts["ok"] == 1
    files.close()
