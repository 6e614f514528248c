"""The pictures of `fedexp analyse` for the report of a sweep: drawn from a run's kept models, no table written."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedexp.analysis.after import kinds
from fedexp.analysis.after.defaults import COMMON, OF_KIND
from fedexp.analysis.after.subject import round_to_show
from fedexp.core.errors import ConfigError
from fedexp.core.pictures import Pictures
from fedexp.rundir import kept_models
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = "first"  # as `client`: the first one whose model of the round is kept


@dataclass(frozen=True)
class Collecting(kinds.Request):
    """A request whose pictures are collected instead of written."""

    drawn: "list[Callable[[], Figure]]" = field(default_factory=list)

    def write(
        self,
        run: RunDirectory,
        name: str,
        table: pd.DataFrame,
        draw: "Callable[[], Figure]",
        arrays: Mapping[str, Any] | None = None,
    ) -> list[str]:
        self.drawn.append(draw)
        return []


def picture_of(run: RunDirectory, kind: str, options: Mapping[str, Any]) -> "Callable[[], Figure]":
    """Return the call that draws the picture of a kind of `fedexp analyse` (loss_plane, hypersphere, tsne).

    options: its flags, as on the command line. Raises ConfigError where the run has not kept what it shows."""
    if not kept_models.local_files(run.directory):
        raise ConfigError(f"{run.directory}: no local models of a round are kept; {kept_models.LOCAL_HINT}")
    given = dict(options)
    if given.get("client") == FIRST:
        number = given["round"] = round_to_show(run)
        given["client"] = kept_models.kept_clients(run.directory, number)[0] if number is not None else None
    request = Collecting(argparse.Namespace(**COMMON | OF_KIND[kind] | given), Pictures())
    measure: Mapping[str, Callable[[RunDirectory, kinds.Request], Sequence[str]]] = {
        "loss_plane": kinds.loss_plane,
        "hypersphere": kinds.hypersphere,
        "tsne": kinds.tsne,
    }
    measure[kind](run, request)
    return request.drawn[0]
