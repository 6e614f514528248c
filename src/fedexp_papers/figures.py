"""Draw the figures of a paper from the runs of the sweep that reproduces them.

The key `pictures` in the sweep's file lists the figures. Each one is a mapping with these keys:

- kind: a figure of `pictures.PICTURES`, or a kind of `fedexp-papers analyse` (one per run)
- name: distinguishes figures of the same sweep; the file is named <sweep>_<name>
- only: the methods to show; all by default
- settings: the settings to show; all by default
- any other key: an option of the kind

The labels are the fields `method` and `setting` of the sweep's axes. If there are several seeds,
figures of single runs show the lowest seed.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedexp.analysis.naming import (
    displayed,
    named_overrides,
    names,
    number_methods,
    shared_overrides,
)
from fedexp.analysis.sweep import normalise
from fedexp.analysis.sweep_figures import Method, Setting, slug, sort_by_seed
from fedexp.core.errors import ConfigError
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.pictures import FOR_EACH_SETTING, PICTURES
from fedexp_papers.posthoc.kinds import KINDS
from fedexp_papers.posthoc.subject import require_local_models, with_defaults
from fedexp_papers.sweeps import PaperSweep, find_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fedexp")
AND = ", "  # separates a method's name from the overrides that the user added
FILTERS = ("kind", "name", "only", "settings")  # keys that are not options of the kind


def make_pictures(
    sweep: PaperSweep, runs: Sequence[RunDirectory]
) -> Iterator[tuple[str, Callable[[], "Figure"]]]:
    """Yield (name, function that draws the figure) for each figure of a paper.

    If the runs lack the data for a figure, it is left out with a warning.
    """
    settings, title = label_runs(sweep, runs), sweep.title.partition(": ")[0]
    for node in sweep.pictures:
        name = "_".join(filter(None, [sweep.name, str(node.get("name", ""))]))
        kind = str(node["kind"])
        drawn: dict[str, Callable[[], Any]] = {}
        if kind in PICTURES and not (kind in FOR_EACH_SETTING and len(settings) > 1):
            drawn[name] = partial(draw_picture, node, settings, title)
        elif kind in PICTURES:
            for setting in settings:
                each = slug(f"{name}_{setting.name}")
                drawn[each] = partial(draw_picture, node, [setting], f"{title}, {setting.name}")
        else:
            for setting in settings:
                for method in setting.methods:
                    each = slug("_".join([name, setting.name, method.name]))
                    drawn[each] = partial(draw_run, node, method.runs[0])
        for each, make in drawn.items():
            try:
                figure = make()
            except ConfigError as error:
                log.warning("the figure %s was not drawn: %s", each, error)
            else:
                yield each, partial(lambda figure: figure, figure)


def draw_run(node: Mapping[str, Any], run: RunDirectory) -> "Figure":
    """Draw a figure of `fedexp-papers analyse` for one run.

    node: see `draw_picture`. Raises ConfigError if the run saved no local models.
    """
    require_local_models(run)
    kind = str(node["kind"])
    return next(KINDS[kind](run, with_defaults(run, kind, select_options(node)))).draw()


def draw_picture(node: Mapping[str, Any], settings: Sequence[Setting], title: str) -> "Figure":
    """Draw one figure.

    node: the figure's mapping in the sweep's file. Raises ConfigError if the runs lack its data.
    """
    only, within = node.get("only"), node.get("settings")
    shown = []
    for setting in settings:
        methods = [m for m in setting.methods if not only or m.name.partition(AND)[0] in only]
        if methods and (not within or setting.name in within):
            shown.append(Setting(setting.name, tuple(methods), setting.common))
    if not shown:
        raise ConfigError(f"no finished run of {', '.join([*(within or ()), *(only or ())])}")
    if settings[0].common:
        title = f"{title} ({settings[0].common})"
    return PICTURES[str(node["kind"])](shown, title, **select_options(node))


def select_options(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in FILTERS}


def label_runs(sweep: PaperSweep, runs: Sequence[RunDirectory]) -> list[Setting]:
    """Group the runs by setting and method, in the order of the sweep's file.

    Names are taken from the sweep's file, followed by the overrides that the user added. A run that
    is not in the file is named by its overrides.
    """
    shared = shared_overrides(runs)
    same = set.intersection(*(set(run.overrides) for run in runs))
    groups: dict[tuple[str, str], list[RunDirectory]] = {}
    for run, (setting, method) in zip(runs, names(runs), strict=True):
        fields = (find_cell(sweep, run.overrides, same) or (None, {}))[1]
        own = [text for text in named_overrides(run) if text not in shared]
        label = displayed([method])[0]
        if "method" in fields:
            label = AND.join([fields["method"], *added_overrides(sweep, own)])
        groups.setdefault((fields.get("setting", setting), label), []).append(run)
    settings, methods = map(set, zip(*groups, strict=True))
    places = number_methods(methods)
    numbers = {name: places[name] for name in sort_labels(sweep, "method", methods)}
    common = " ".join(added_overrides(sweep, sorted(shared)))
    found = []
    for setting in sort_labels(sweep, "setting", settings):
        shown = [
            Method(name, sort_by_seed(groups[setting, name]), number)
            for name, number in numbers.items()
            if (setting, name) in groups
        ]
        found.append(Setting(setting, tuple(shown), common))
    return found


def sort_labels(sweep: PaperSweep, field: str, labels: Iterable[str]) -> list[str]:
    """Sort labels as in the sweep's file. Labels that are not in the file come last."""
    known: dict[str | None, int] = {}
    for block in sweep.blocks:
        for combination in block.combinations():
            known.setdefault(block.fields(combination).get(field), len(known))

    def place(label: str) -> tuple[int, str]:
        own = known.get(label, known.get(label.partition(AND)[0], len(known)))
        return own, label

    return sorted(labels, key=place)


def added_overrides(sweep: PaperSweep, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that the user added to the sweep's overrides."""
    return [
        text
        for text in overrides
        if text.partition("=")[0] not in sweep.keys and normalise(text) not in sweep.fixed
    ]
