"""Metrics, the run directory, trackers, progress, the report.

A loop needs `Observer` only; a worker reports its memory by `memory_peaks`.
"""

from quintet.observe.memory import combine_peaks, memory_peaks
from quintet.observe.observer import Observer
from quintet.observe.phases import PhaseTimer
from quintet.observe.progress import Progress
from quintet.observe.report import write_report
from quintet.runs.directory import RunDirectory, package_versions

__all__ = [
    "Observer",
    "PhaseTimer",
    "Progress",
    "RunDirectory",
    "combine_peaks",
    "memory_peaks",
    "package_versions",
    "write_report",
]
