"""Runs beside the tables and figures of the papers: printed numbers, verdicts, REPRODUCTION.md.

Only the subcommands `report`, `view` and `reproduction`, and the report at the end of a sweep,
import it.
"""
