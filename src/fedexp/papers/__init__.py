"""Compare runs with the tables and figures of the papers.

This package is imported only by the subcommands `report`, `view` and `reproduction`, and by the
report at the end of a sweep.
"""
