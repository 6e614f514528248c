"""Draw the pictures of `fedexp analyse` for a sweep's report, from kept models and without writing
tables."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedexp.analysis.posthoc import joint, kinds
from fedexp.analysis.posthoc.defaults import COMMON, OF_KIND
from fedexp.analysis.posthoc.features import Cloud
from fedexp.analysis.posthoc.noise import NoiseCurve
from fedexp.analysis.posthoc.subject import Subject, round_to_show, rounds_to_show
from fedexp.core.errors import ConfigError
from fedexp.figures.pictures import Pictures
from fedexp.rundir import kept_models
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = "first"  # value of `client`: the first client whose model of the round is kept


@dataclass(frozen=True)
class Collecting(kinds.Request):
    """A request that collects its pictures instead of writing files."""

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
    """Return a function that draws the picture of a kind of `fedexp analyse`.

    kind: loss_plane, hypersphere or tsne. options: its flags, as on the command line. Raises
    ConfigError if the run did not keep the models that the picture shows.
    """
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
    """Return (result of `fedexp analyse <run> noise` with these flags, description of the model).

    Raises ConfigError if the model was not kept.
    """
    request = request_of(run, "noise", options)
    subject = request.subject(run, request.options.round, request.options.client)
    return kinds.noise_of(subject, request), kinds.whose(subject)


def joint_clouds(
    runs: Mapping[str, RunDirectory], options: Mapping[str, Any]
) -> tuple[list[Cloud], Subject]:
    """Return (result of `fedexp analyse <run> tsne --with <run>`, subject of the first run).

    The round is the last one with kept local models. Raises ConfigError if a run keeps none.
    """
    for run in runs.values():
        require_local_models(run)
    first = next(iter(runs.values()))
    request = request_of(first, "tsne", options)
    (number,) = rounds_to_show(first, [])
    subjects = joint.subjects_alike(runs, request, number)
    return joint.embedded_models(subjects, request, number), next(iter(subjects.values()))


def require_local_models(run: RunDirectory) -> None:
    """Raise ConfigError if a run keeps no local models."""
    if not kept_models.local_files(run.directory):
        raise ConfigError(
            f"{run.directory}: no local models of a round are kept; {kept_models.LOCAL_HINT}"
        )


def request_of(run: RunDirectory, kind: str, options: Mapping[str, Any]) -> Collecting:
    """Build a request from flags and the defaults of the kind.

    `client: first` selects the first client whose model is kept in the last round with local
    models.
    """
    given = dict(options)
    if given.get("client") == FIRST:
        require_local_models(run)
        number = given["round"] = round_to_show(run)
        given["client"] = (
            kept_models.kept_clients(run.directory, number)[0] if number is not None else None
        )
    return Collecting(argparse.Namespace(**COMMON | OF_KIND[kind] | given), Pictures())
