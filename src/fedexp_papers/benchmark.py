"""Choose the best values of the search for the benchmark, and write the commands that run them."""

import shlex
from pathlib import Path

from fedexp.analysis.frame import select_runs, tidy
from fedexp.core.errors import ConfigError
from fedexp.core.storage import write_atomically
from fedexp.rundir.sweeps import own_jobs

SCORE = "validation_accuracy"


def write_commands(directory: Path, figures: bool) -> list[Path]:
    """Write final.sh with a command for each method, and return its path.

    A method's best configuration has the highest validation accuracy in the last round, averaged
    over all settings of the search. A diverged run counts as 0. Raises ConfigError if a
    configuration was not run in all settings. directory: of the search. figures: not used.
    """
    table = tidy(select_runs(own_jobs(directory)))
    if SCORE not in table:
        raise ConfigError(f"{directory}: the runs have no {SCORE}; search with validation.fraction")
    table = table.assign(score=table[SCORE].where(~table["diverged"], 0.0).fillna(0.0))
    found = table.groupby("method")["score"].agg(["mean", "size"])
    short = found[found["size"] < found["size"].max()]
    if len(short):
        raise ConfigError(
            f"{directory}: {short.index[0]} has {short['size'].iloc[0]} finished runs, others have"
            f" {found['size'].max()}; run the search again to complete it"
        )
    runs = table.drop_duplicates("method").set_index("method")["run"]
    best = found.groupby(found.index.str.split().str[0])["mean"].idxmax()
    lines = ["set -e"]
    for method in best:
        run = runs[method]
        values = [text for text in run.overrides if text.startswith(("algorithm.", "local."))]
        algorithm = f"algorithm={run.summary['algorithm']}"
        command = ["fedexp", "--multirun", "sweep=benchmark", algorithm, *values]
        lines.append(f'{shlex.join(command)} "$@"  # {found["mean"][method]:.4f}')
    path = directory / "final.sh"
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return [path]
