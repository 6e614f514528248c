"""Metrics: pure functions of arrays, and the `forgetting_metric` classes that log their values."""
