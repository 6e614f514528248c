"""Metrics: pure functions of saved arrays, and the objects of the `forgetting_metric` group that
log them."""
