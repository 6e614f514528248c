"""Metrics: pure functions of arrays, and classes that a run uses to log these metrics."""
