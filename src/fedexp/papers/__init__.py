"""Compare runs with the tables and figures of the papers: published values, verdicts,
REPRODUCTION.md.

This package is imported only by the subcommands `report`, `view` and `reproduction`, and by the
report at the end of a sweep.
"""
