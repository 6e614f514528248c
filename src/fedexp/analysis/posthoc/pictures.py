"""Compute the results of `fedexp analyse` for a sweep's report, without writing files."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from fedexp.analysis.posthoc import kinds
from fedexp.analysis.posthoc.defaults import COMMON, OF_KIND
from fedexp.analysis.posthoc.features import Cloud, embed_models
from fedexp.analysis.posthoc.noise import NoiseCurve
from fedexp.analysis.posthoc.subject import Subject, last_local_round, model_name
from fedexp.core.errors import ConfigError
from fedexp.rundir import kept_models
from fedexp.rundir.reader import RunDirectory


def make_picture(run: RunDirectory, kind: str, options: Mapping[str, Any]) -> Callable[[], Figure]:
    """Return a function that draws the figure of a kind of `fedexp analyse`.

    kind: loss_plane, hypersphere or tsne. options: the flags of this kind, with the names and
    values of the command line. Raises ConfigError if the run did not save the models that the
    figure shows.
    """
    require_local_models(run)
    return next(kinds.KINDS[kind](run, with_defaults(run, kind, options))).draw


def noise_result(run: RunDirectory, options: Mapping[str, Any]) -> tuple[NoiseCurve, str]:
    """Return (results, model's name) of `fedexp analyse <run> noise`, run with these flags.

    Raises ConfigError if the model was not saved.
    """
    given = with_defaults(run, "noise", options)
    subject = kinds.selected_subject(run, given, given.round, given.client)
    return kinds.measured_noise(subject, given), model_name(subject.model)


def joint_embedding(
    runs: Mapping[str, RunDirectory], options: Mapping[str, Any]
) -> tuple[list[Cloud], Subject]:
    """Return a joint t-SNE of the runs' models, and the `Subject` of the first run.

    This is `fedexp analyse <run> tsne --with <run>` for the last round with saved local models.
    Raises ConfigError if a run has no such round.
    """
    number, *_ = [require_local_models(run) for run in runs.values()]
    given = with_defaults(next(iter(runs.values())), "tsne", options)
    subjects = kinds.comparable_subjects(runs, given, number)
    clouds = embed_models(subjects, number, given.clients, given.seed, given.perplexity)
    return clouds, next(iter(subjects.values()))


def require_local_models(run: RunDirectory) -> int:
    """Return the last round with saved local models. Raises ConfigError if no round has any."""
    number = last_local_round(run)
    if number is None:
        raise ConfigError(f"{run.directory}: no local models were saved; {kept_models.LOCAL_HINT}")
    return number


def with_defaults(run: RunDirectory, kind: str, options: Mapping[str, Any]) -> Namespace:
    """Return the given flags, and the default values of all other flags.

    `client: first` selects the first local model from the last round with saved local models.
    """
    given = dict(options)
    if given.get("client") == "first":
        given["round"] = require_local_models(run)
        files = kept_models.model_files(run.directory)
        clients = [client for number, client in files if number == given["round"]]
        given["client"] = min(client for client in clients if client is not None)
    return Namespace(**COMMON | OF_KIND[kind] | given)
