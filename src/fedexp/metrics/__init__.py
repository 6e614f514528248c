"""Metrics: pure functions of saved arrays, and the `forgetting_metric` classes that log their
values."""
