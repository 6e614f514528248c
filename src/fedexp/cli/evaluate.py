"""Choose the data set and format the table for `fedexp evaluate RUN [dataset=...]`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.config.composition import composed, without_hydra
from fedexp.core.errors import ConfigError

if TYPE_CHECKING:
    from fedexp.analysis.evaluation import Evaluation, TestData


def read_dataset(
    overrides: Sequence[str], config_dir: Path | None = None, by_position: bool = False
) -> "TestData":
    """Return the data set and the data directory that the overrides choose.

    The data set is None if the overrides do not choose one. The directory is None if the overrides
    do not set `data_dir`. It is also None if they choose a data set, because the configuration of
    the data set contains the directory. Raises ConfigError for an override of any other option, and
    for `by_position` without a data set.
    """
    from fedexp.analysis.evaluation import TestData
    from fedexp.config.overrides import key_of
    from fedexp.config.values import make_target, resolve
    from fedexp.data.types import DataSource

    keys = [key_of(text) for text in overrides]
    if wrong := [
        k for k in keys if k not in ("dataset", "data_dir") and not k.startswith("dataset.")
    ]:
        raise ConfigError(
            f"{wrong[0]}: only dataset, its keys (such as dataset.root) and data_dir can be set"
        )
    if by_position and "dataset" not in keys:
        raise ConfigError("--by-position: is for another data set; add dataset=<option>")
    if not keys:
        return TestData()
    if "dataset" not in keys and (within := [k for k in keys if k != "data_dir"]):
        raise ConfigError(
            f"{within[0]}: can be set only together with dataset=<option>; to use the run's test"
            f" set, leave out {within[0]}"
        )
    with composed(overrides, config_dir) as config:
        values = resolve(without_hydra(config))
        if "dataset" not in keys:
            return TestData(data_dir=str(values["data_dir"]))
        dataset = make_target(values["dataset"], "dataset", DataSource)
        return TestData(dataset, by_position=by_position)


def format_table(found: "Evaluation") -> str:
    """Return the accuracies as a text table, one row per class."""
    names = found.classes["name"].astype(str)
    text = found.classes.to_string(
        columns=["name", "examples", "correct", "accuracy"],
        header=["class", "examples", "correct", "accuracy"],
        index=False,
        na_rep="-",
        float_format="{:.4f}".format,
        formatters={"name": f"{{!s:<{names.str.len().max()}}}".format},
    )
    return (
        f"{found.dataset}, {found.examples:,} test examples, model after round {found.round}: "
        f"accuracy {found.accuracy:.4f}, loss {found.loss:.4f}\n\n{text}"
    )
