"""Reports of a run: the contract of its files, every metric and its formula, comparison, health, and pages to read.

This package knows no other: whoever records a run hands it rows with the columns of `REQUEST_COLUMNS` and
`FLEET_COLUMNS`, and everything else follows from these. Importing it opens nothing.
"""

from reports.arms import SLO_KEYS, arm_metrics
from reports.compare import TOO_CLOSE, Call, call, make_arms, winner
from reports.errors import RecordError, ReportError, RunFolderError, SloError, UnknownMetricError
from reports.health import HealthFacts, health
from reports.html import write_html
from reports.markdown import write_markdown
from reports.metrics_table import METRICS, Metric, addresses, direction_of, lookup, metric_of
from reports.records import (
    FLEET_BIN_US,
    FLEET_COLUMNS,
    PHASES,
    REQUEST_COLUMNS,
    STATUSES,
    fleet_frame,
    read_json_lines,
    read_parquet,
    requests_frame,
    write_parquet,
)
from reports.run import SCHEMA_VERSION, RunResult, finish_run, read_run, render_reports, start_run
from reports.terminal import mode_comparison, terminal_table

__all__ = [
    "FLEET_BIN_US",
    "FLEET_COLUMNS",
    "METRICS",
    "PHASES",
    "REQUEST_COLUMNS",
    "SCHEMA_VERSION",
    "SLO_KEYS",
    "STATUSES",
    "TOO_CLOSE",
    "Call",
    "HealthFacts",
    "Metric",
    "RecordError",
    "ReportError",
    "RunFolderError",
    "RunResult",
    "SloError",
    "UnknownMetricError",
    "addresses",
    "arm_metrics",
    "call",
    "direction_of",
    "finish_run",
    "fleet_frame",
    "health",
    "lookup",
    "make_arms",
    "metric_of",
    "mode_comparison",
    "read_json_lines",
    "read_parquet",
    "read_run",
    "render_reports",
    "requests_frame",
    "start_run",
    "terminal_table",
    "winner",
    "write_html",
    "write_markdown",
    "write_parquet",
]
