"""Embed models of several runs in one plane, by a t-SNE of all their features (FedNTD Fig. 21)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedexp.analysis.posthoc.features import Cloud, embedded
from fedexp.analysis.posthoc.subject import Subject, models_of_round
from fedexp.core.errors import ConfigError
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from fedexp.analysis.posthoc.kinds import Request


def told_apart(runs: Sequence[RunDirectory]) -> dict[str, RunDirectory]:
    """Return name -> run. The name is the run's algorithm or, if algorithms repeat, its directory.

    A single run has the name "". Raises ConfigError if a run is given twice.
    """
    if len(runs) == 1:
        return {"": runs[0]}
    folders = [run.directory.resolve() for run in runs]
    algorithms = [str(run.summary.get("algorithm", "")) for run in runs]
    for names in (algorithms, [folder.name for folder in folders], list(map(str, folders))):
        if all(names) and len(set(names)) == len(runs):
            return dict(zip(names, runs, strict=True))
    raise ConfigError(f"--with {runs[-1].directory}: each run must be named once")


def subjects_alike(
    runs: Mapping[str, RunDirectory], request: "Request", number: int
) -> dict[str, Subject]:
    """Return name -> subject for the models of a round. Raises ConfigError if the runs' examples
    differ."""
    found = {name: request.subject(run, number) for name, run in runs.items()}
    first, *others = found.values()
    for each in others:
        mine, theirs = first.runtime.data, each.runtime.data
        same = all(
            a.shape == b.shape and bool((a == b).all())
            for a, b in ((mine.x_test, theirs.x_test), (mine.y_test, theirs.y_test))
        )
        if not same:
            raise ConfigError(
                f"{each.run.directory}: has other examples than {first.run.directory}, so that"
                " their features cannot be compared in one plane"
            )
    return found


def embedded_models(
    subjects: Mapping[str, Subject], request: "Request", number: int
) -> list[Cloud]:
    """Return the features of the models that each run keeps of a round, embedded in one plane.

    Raises ConfigError if the features of the runs have different dimensions.
    """
    options = request.options
    models = [
        (name, subject, each)
        for name, subject in subjects.items()
        for each in models_of_round(subject.run, number, options.clients)
    ]
    features = [subject.features(each.kept) for _, subject, each in models]
    sizes = sorted({each.shape[1] for each in features})
    if len(sizes) > 1:
        raise ConfigError(
            f"{' and '.join(subjects)}: their features have {' and '.join(map(str, sizes))}"
            " dimensions, so that they have no common plane"
        )
    places = embedded(features, options.seed, options.perplexity)
    return [
        Cloud(name, each.name, found) for (name, _, each), found in zip(models, places, strict=True)
    ]
