"""Metrics: pure functions of arrays, and the classes with which a run logs their values."""
