"""`python -m fedexp.report DIRECTORY ... --out TABLE`: the runs below directories as one table, TABLE.csv and
TABLE.md."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedexp import files
from fedexp.files import write_atomically

COLUMNS = {  # column -> how it is printed
    "dataset": "{}",
    "algorithm": "{}",
    "seed": "{}",
    "status": "{}",
    "rounds": "{:,}",
    "accuracy": "{:.4f}",
    "last5_accuracy": "{:.4f}",
    "best_accuracy": "{:.4f}",
    "forgetting": "{:.3f}",
    "round_forgetting": "{:.4f}",
    "seconds_per_round": "{:.1f}",
    "mb_up_per_client": "{:.2f}",
    "mb_down_per_client": "{:.2f}",
}


def runs(directories: Sequence[Path]) -> Iterator[Path]:
    """Run directories at or below these that have a summary."""
    for directory in directories:
        yield from sorted(path.parent for path in directory.rglob(files.SUMMARY))


def row(directory: Path) -> dict[str, Any]:
    """One run. last5_accuracy: mean over the last five evaluated rounds; bytes: mean of a client's exchange in a
    round."""
    summary = json.loads((directory / files.SUMMARY).read_text(encoding="utf-8"))
    rounds = pd.read_csv(directory / files.ROUNDS)
    trained = rounds[rounds["round"] >= 1]
    clients = pd.read_csv(directory / files.CLIENTS).groupby("round").size().mean()
    values = {name: summary.get(name) for name in COLUMNS}
    return values | {
        "last5_accuracy": trained["test_accuracy"].dropna().tail(5).mean(),
        "seconds_per_round": trained["seconds"].median(),
        "mb_up_per_client": trained["bytes_up"].mean() / clients / 1e6,
        "mb_down_per_client": trained["bytes_down"].mean() / clients / 1e6,
    }


def markdown(table: pd.DataFrame) -> str:
    def cell(name: str, value: Any) -> str:
        return "" if pd.isna(value) else COLUMNS[name].format(value)

    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for _, values in table.iterrows():
        lines.append("| " + " | ".join(cell(name, values[name]) for name in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fedexp.report", description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="path of the two files without their suffix")
    options = parser.parse_args(arguments)
    found = [row(directory) for directory in runs(options.directories)]
    if not found:
        print(f"fedexp: no finished run below {', '.join(map(str, options.directories))}", file=sys.stderr)
        return 2
    table = pd.DataFrame(found, columns=list(COLUMNS)).sort_values(["dataset", "algorithm", "seed"])
    write_atomically(options.out.with_suffix(".csv"), table.to_csv(index=False).encode())
    write_atomically(options.out.with_suffix(".md"), markdown(table).encode())
    print(markdown(table), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
