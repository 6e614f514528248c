"""Draw the figures of a paper from the runs of the sweep that reproduces them.

The key `pictures` in the sweep's file lists the figures. Each one is a mapping with these keys:

- kind: a function of `fedexp_papers.pictures`, or a kind of `fedexp-papers analyse`
- name: distinguishes figures of the same sweep; the file is named <sweep>_<name>
- per: `setting` or `run` for separate figures; by default, one figure shows all settings
- only: the methods to show; all by default
- settings: the settings to show; all by default
- any other key: an option of the function or a flag of the kind

The labels are the fields `method` and `setting` of the sweep's axes. If there are several seeds,
figures of single runs show the lowest seed.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedexp.analysis.naming import (
    display_names,
    displayed,
    named_overrides,
    names,
    shared_overrides,
)
from fedexp.analysis.sweep_figures import Setting, group_runs, slug
from fedexp.core.errors import ConfigError
from fedexp.rundir.jobs import normalise
from fedexp.rundir.reader import RunDirectory
from fedexp_papers import pictures
from fedexp_papers.command import make_parser
from fedexp_papers.posthoc.flags import KINDS, make_results
from fedexp_papers.sweeps import PaperSweep, find_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fedexp")
AND = ", "  # separates a method's name from the overrides that the user added
FILTERS = ("kind", "name", "only", "per", "settings")  # keys that are not options of the kind


def make_pictures(
    sweep: PaperSweep, runs: Sequence[RunDirectory]
) -> Iterator[tuple[str, Callable[[], "Figure"]]]:
    """Yield (name, function that draws the figure) for each figure of a paper.

    If the runs lack the data for a figure, it is left out with a warning.
    """
    settings, paper = label_runs(sweep, runs), sweep.title.partition(": ")[0]
    for node in sweep.pictures:
        for words, shown in split_settings(select_settings(settings, node), node.get("per")):
            name = "_".join(filter(None, [sweep.name, node.get("name"), *words]))
            name = slug(name) if words else name
            try:
                figure = draw_picture(node, shown, ", ".join([paper, *words]))
            except ConfigError as error:
                log.warning("the figure %s was not drawn: %s", name, error)
            else:
                yield name, partial(lambda figure: figure, figure)


def select_settings(settings: Sequence[Setting], node: Mapping[str, Any]) -> list[Setting]:
    """Return the settings that a figure shows, with the methods that it shows."""
    only, within = node.get("only"), node.get("settings")
    found = []
    for setting in settings:
        methods = [m for m in setting.methods if not only or m.name.partition(AND)[0] in only]
        if methods and (not within or setting.name in within):
            found.append(replace(setting, methods=tuple(methods)))
    return found


def split_settings(
    settings: list[Setting], per: str | None
) -> list[tuple[list[str], list[Setting]]]:
    """Return what each figure shows, and the words that are added to its name and title."""
    if per == "run" and settings:
        return [
            ([setting.name, method.name], [replace(setting, methods=(method,))])
            for setting in settings
            for method in setting.methods
        ]
    if per == "setting" and len(settings) > 1:
        return [([setting.name], [setting]) for setting in settings]
    return [([], settings)]


def draw_picture(node: Mapping[str, Any], settings: Sequence[Setting], title: str) -> "Figure":
    """Draw one figure.

    node: the figure's mapping in the sweep's file. Raises ConfigError if the runs lack its data.
    """
    if not settings:
        raise ConfigError("no finished run has the settings and the methods of the figure")
    if settings[0].common:
        title = f"{title} ({settings[0].common})"
    kind = str(node["kind"])
    options = {key: value for key, value in node.items() if key not in FILTERS}
    if kind not in KINDS:
        return getattr(pictures, kind)(settings, title, **options)
    methods = pictures.list_methods(settings)
    runs = {method.name if methods[1:] else "": method.runs[0] for method in methods}
    flags = [f"--{key}={value}" for key, value in options.items()]
    first = str(methods[0].runs[0].directory)
    given = make_parser().parse_args(["analyse", first, kind, *flags])
    return next(make_results(runs, given, title)).draw()


def label_runs(sweep: PaperSweep, runs: Sequence[RunDirectory]) -> list[Setting]:
    """Group the runs by setting and method, in the order of the sweep's file.

    Names are taken from the sweep's file, followed by the overrides that the user added. A run that
    is not in the file is named by its overrides.
    """
    shared = shared_overrides(runs)
    same = set.intersection(*(set(run.overrides) for run in runs))
    named = []
    for run, (setting, method) in zip(runs, names(runs), strict=True):
        fields = (find_cell(sweep, run.overrides, same) or (None, {}))[1]
        own = [text for text in named_overrides(run) if text not in shared]
        label = displayed([method])[0]
        if "method" in fields:
            label = AND.join([fields["method"], *added_overrides(sweep, own)])
        named.append((fields.get("setting", setting), label))
    found = group_runs(runs, named, " ".join(added_overrides(sweep, sorted(shared))))
    place, place_of_method = place_in(sweep, "setting"), place_in(sweep, "method")
    # names that are not algorithms, such as data sets, have the first colours
    algorithms = len(display_names())
    offset = algorithms if all(m.number >= algorithms for s in found for m in s.methods) else 0
    ordered = []
    for each in found:
        methods = [replace(method, number=method.number - offset) for method in each.methods]
        methods.sort(key=lambda method: place_of_method(method.name))
        ordered.append(replace(each, methods=tuple(methods)))
    return sorted(ordered, key=lambda setting: place(setting.name))


def place_in(sweep: PaperSweep, field: str) -> Callable[[str], tuple[int, str]]:
    """Return a sort key of labels: the place in the sweep's file; other labels come last."""
    known: dict[str | None, int] = {}
    for block in sweep.blocks:
        for combination in block.combinations():
            known.setdefault(block.fields(combination).get(field), len(known))
    return lambda label: (known.get(label, known.get(label.partition(AND)[0], len(known))), label)


def added_overrides(sweep: PaperSweep, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that the user added to the sweep's overrides."""
    return [
        text
        for text in overrides
        if text.partition("=")[0] not in sweep.keys and normalise(text) not in sweep.fixed
    ]
