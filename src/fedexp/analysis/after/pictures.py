"""The pictures of `fedexp analyse` for the report of a sweep: drawn from a run's kept models, no
table written."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedexp.analysis.after import joint, kinds
from fedexp.analysis.after.defaults import COMMON, OF_KIND
from fedexp.analysis.after.features import Cloud
from fedexp.analysis.after.noise import NoiseCurve
from fedexp.analysis.after.subject import Subject, round_to_show, rounds_to_show
from fedexp.core.errors import ConfigError
from fedexp.figures.pictures import Pictures
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
    """Return the call that draws the picture of a kind of `fedexp analyse` (loss_plane,
    hypersphere, tsne).

    options: its flags, as on the command line. Raises ConfigError where the run has not kept what
    it shows."""
    require_local_models(run)
    request = request_of(run, kind, options)
    measure: Mapping[str, Callable[[RunDirectory, kinds.Request], Sequence[str]]] = {
        "loss_plane": kinds.loss_plane,
        "hypersphere": kinds.hypersphere,
        "tsne": kinds.tsne,
    }
    measure[kind](run, request)
    return request.drawn[0]


def noise_of(run: RunDirectory, options: Mapping[str, Any]) -> tuple[NoiseCurve, str]:
    """Return what `fedexp analyse <run> noise` finds with these flags, and of which model. Raises
    ConfigError where it is not kept."""
    request = request_of(run, "noise", options)
    subject = request.subject(run, request.options.round, request.options.client)
    return kinds.noise_of(subject, request), kinds.whose(subject)


def joint_clouds(
    runs: Mapping[str, RunDirectory], options: Mapping[str, Any]
) -> tuple[list[Cloud], Subject]:
    """Return what `fedexp analyse <run> tsne --with <run>` finds with these flags in the last round
    whose local models are kept, and the subject of the first run. Raises ConfigError where there
    are none."""
    for run in runs.values():
        require_local_models(run)
    first = next(iter(runs.values()))
    request = request_of(first, "tsne", options)
    (number,) = rounds_to_show(first, [])
    subjects = joint.subjects_alike(runs, request, number)
    return joint.embedded_models(subjects, request, number), next(iter(subjects.values()))


def require_local_models(run: RunDirectory) -> None:
    """Raise ConfigError where a run keeps no local models."""
    if not kept_models.local_files(run.directory):
        raise ConfigError(
            f"{run.directory}: no local models of a round are kept; {kept_models.LOCAL_HINT}"
        )


def request_of(run: RunDirectory, kind: str, options: Mapping[str, Any]) -> Collecting:
    """Return the request that flags stand for, with the defaults of the kind. `client: first` is
    the first one whose model is kept of the last round with local models."""
    given = dict(options)
    if given.get("client") == FIRST:
        require_local_models(run)
        number = given["round"] = round_to_show(run)
        given["client"] = (
            kept_models.kept_clients(run.directory, number)[0] if number is not None else None
        )
    return Collecting(argparse.Namespace(**COMMON | OF_KIND[kind] | given), Pictures())
