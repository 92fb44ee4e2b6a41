"""Metrics, the run directory, trackers, progress, the report."""
