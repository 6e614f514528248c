"""Searches: sweeps that try several values of a key, and whose report names the best one.

The rule: of each block and setting the value with the highest test accuracy in the last round, as a
mean over seeds; a run that diverged does not count, and a value of which every run diverged is not
chosen.
"""

import statistics
from collections.abc import Sequence

import pandas as pd

from fedexp.analysis.layout import Section
from fedexp.analysis.sweep import Sweep
from fedexp.rundir.reader import RunDirectory

RULE = "Chosen values: the highest accuracy in the last round, mean over seeds"


def sections(sweep: Sweep, runs: Sequence[RunDirectory]) -> list[Section]:
    """Return a row for each block and setting of a search with the value chosen; [] where no run of
    it is over."""
    rows: dict[str, dict[str, str]] = {}
    for block in sweep.blocks:
        key = next(key for key in block.axes if "." in key)
        (setting,) = (other for other in block.axes if other != key)
        for place in block.axes[setting]:
            found = {}
            for value in block.axes[key]:
                wanted = {f"{setting}={place}", f"{key}={value}", *block.fixed}
                mine = [run for run in runs if wanted <= set(run.overrides) and not run.diverged]
                if accuracies := [run.summary["accuracy"] for run in mine]:
                    found[value] = statistics.fmean(accuracies)
            if found:
                best = max(found, key=lambda value: found[value])
                tried = ", ".join(
                    f"{value}: {100 * accuracy:.2f}" for value, accuracy in found.items()
                )
                name = f"{' '.join(block.fixed).replace('algorithm=', '')} {place}"
                missing = len(block.axes[key]) - len(found)
                state = f"; {missing} of {len(block.axes[key])} without a number" if missing else ""
                rows[name] = {"chosen": f"`{key}={best}`", "accuracy of each": tried + state}
    return [Section(RULE, pd.DataFrame.from_dict(rows, orient="index"))] if rows else []
