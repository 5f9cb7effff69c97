"""Every error that `reports` raises, in one tree. A message says what was found, why it cannot work, what to change.

ReportError
├── RecordError         rows or columns that break the contract of the run's files
├── UnknownMetricError  a metric address that the table does not know
├── SloError            a bound on something that is no per-request figure
├── RunFolderError      a folder that holds no run, or one written by another version
├── BaselineError       a baseline that is not there, cannot be read, or must not be written
├── RuleError           a rule of the gate that cannot be understood or can never be judged
└── ExportError         a format that is not known, or a run that it cannot hold
"""


class ReportError(Exception):
    """Base of all errors of this package."""


class RecordError(ReportError):
    """Rows or columns that break the contract of the run's files."""


class UnknownMetricError(ReportError):
    """A metric address that the table does not know."""


class SloError(ReportError):
    """A bound on something that is no per-request figure."""


class RunFolderError(ReportError):
    """A folder that holds no run, or one written by another version."""


class BaselineError(ReportError):
    """A baseline that is not there, cannot be read, or must not be written."""


class RuleError(ReportError):
    """A rule of the gate that cannot be understood or can never be judged."""


class ExportError(ReportError):
    """A format that is not known, or a run that it cannot hold."""
