"""Reports of a run: the contract of its files, every metric and its formula, comparison, health, and pages to read.

This package knows no other: whoever records a run hands it rows with the columns of `REQUEST_COLUMNS`,
`FLEET_COLUMNS` and `ROUTER_COLUMNS`, and everything else follows from these. Importing it opens nothing.
"""

from reports.arms import SLO_KEYS, arm_metrics
from reports.baseline import FOLDER as BASELINE_FOLDER
from reports.baseline import baseline_document, list_baselines, read_figures, save_baseline
from reports.comparable import Complaint
from reports.compare import TOO_CLOSE, Call, call, make_arms, winner
from reports.errors import (
    BaselineError,
    ExportError,
    RecordError,
    ReportError,
    RuleError,
    RunFolderError,
    SloError,
    UnknownMetricError,
)
from reports.exports import EXPORTS, NOT_EXPORTED, export_run
from reports.gate import EXIT_CODES, GateResult, Line, gate
from reports.gate_view import gate_markdown, gate_table, junit, rules_text, self_test_table
from reports.health import HealthFacts, health
from reports.html import write_html
from reports.injections import Injection, self_test
from reports.markdown import write_markdown
from reports.merge import merge_runs
from reports.metric import Metric
from reports.metrics_table import METRICS, addresses, direction_of, lookup, metric_of
from reports.page import Page, write_page
from reports.plot_parts import Plot, log_ticks
from reports.records import (
    FLEET_BIN_US,
    FLEET_COLUMNS,
    PHASES,
    REQUEST_COLUMNS,
    ROUTER_COLUMNS,
    STATUSES,
    fleet_frame,
    read_json_lines,
    read_parquet,
    requests_frame,
    router_frame,
    write_parquet,
)
from reports.rules import Rule, Rules, default_rules, read_rules, rules_of
from reports.run import SCHEMA_VERSION, RunResult, finish_run, read_run, render_reports, start_run
from reports.stages import stages_of
from reports.terminal import console, mode_comparison, terminal_table

__all__ = [
    "BASELINE_FOLDER",
    "EXIT_CODES",
    "EXPORTS",
    "FLEET_BIN_US",
    "FLEET_COLUMNS",
    "METRICS",
    "NOT_EXPORTED",
    "PHASES",
    "REQUEST_COLUMNS",
    "ROUTER_COLUMNS",
    "SCHEMA_VERSION",
    "SLO_KEYS",
    "STATUSES",
    "TOO_CLOSE",
    "BaselineError",
    "Call",
    "Complaint",
    "ExportError",
    "GateResult",
    "HealthFacts",
    "Injection",
    "Line",
    "Metric",
    "Page",
    "Plot",
    "RecordError",
    "ReportError",
    "Rule",
    "RuleError",
    "Rules",
    "RunFolderError",
    "RunResult",
    "SloError",
    "UnknownMetricError",
    "addresses",
    "arm_metrics",
    "baseline_document",
    "call",
    "console",
    "default_rules",
    "direction_of",
    "export_run",
    "finish_run",
    "fleet_frame",
    "gate",
    "gate_markdown",
    "gate_table",
    "health",
    "junit",
    "list_baselines",
    "log_ticks",
    "lookup",
    "make_arms",
    "merge_runs",
    "metric_of",
    "mode_comparison",
    "read_figures",
    "read_json_lines",
    "read_parquet",
    "read_rules",
    "read_run",
    "render_reports",
    "requests_frame",
    "router_frame",
    "rules_of",
    "rules_text",
    "save_baseline",
    "self_test",
    "self_test_table",
    "stages_of",
    "start_run",
    "terminal_table",
    "winner",
    "write_html",
    "write_markdown",
    "write_page",
    "write_parquet",
]
