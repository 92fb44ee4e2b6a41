"""Metrics, trackers, progress, the report. A loop needs `observer.Observer` alone; a worker reports its memory by `memory.memory_peaks`."""
