"""The figures of a paper, drawn from the runs of the sweep that has their name: `pictures` in
conf/sweep/<name>.yaml.

Each is a mapping with `kind` (one of `draw_one` or of AFTER), options of that kind and, where a
sweep has several, `name`: the picture is <sweep>_<name>, and of AFTER one of each run. `only` names
the methods that a picture shows, `settings` the settings; without them it shows all. The fields
`setting` and `method` beside the values of the sweep's axes label its runs; of several seeds,
pictures of single runs show the lowest.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedexp.analysis.naming import displayed, named_overrides, names, shared_overrides
from fedexp.analysis.sweep import Sweep, find_cell, normalise
from fedexp.analysis.sweep_figures import Method, Setting, slug, sort_by_seed
from fedexp.core.errors import ConfigError
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fedexp")
AND = ", "  # between the name of a method and what the user varies beside the sweep
AFTER = ("loss_plane", "hypersphere", "tsne")  # kinds of `fedexp analyse`: a picture for each run


def paper_pictures(
    sweep: Sweep | None, runs: Sequence[RunDirectory]
) -> "Iterator[tuple[str, Callable[[], Figure]]]":
    """Yield (name, call that draws it) of the pictures that a named sweep asks for; one that its
    runs have no data for is left out, which is said."""
    if sweep is None or not sweep.pictures or not runs:
        return
    settings = labelled(sweep, runs)
    for node in sweep.pictures:
        name = "_".join(filter(None, [sweep.name, str(node.get("name", ""))]))
        if node["kind"] in AFTER:
            yield from pictures_of_runs(node, settings, name)
            continue
        try:
            figure = draw_one(node, settings, sweep.title.partition(": ")[0])
        except ConfigError as error:
            log.warning("%s: not drawn (%s)", name, error)
            continue
        yield name, partial(lambda figure: figure, figure)


def pictures_of_runs(
    node: Mapping[str, Any], settings: Sequence[Setting], name: str
) -> "Iterator[tuple[str, Callable[[], Figure]]]":
    """Yield (name, call that draws it) of an analysis of kept models, a picture for each setting
    and method."""
    from fedexp.analysis.posthoc.pictures import make_picture

    options = {key: value for key, value in node.items() if key not in ("kind", "name")}
    for setting in settings:
        for method in setting.methods:
            each = slug("_".join([name, setting.name, method.name]))
            try:
                yield each, make_picture(method.runs[0], str(node["kind"]), options)
            except ConfigError as error:
                log.warning("%s: not drawn (%s)", each, error)


def draw_one(node: Mapping[str, Any], settings: Sequence[Setting], title: str) -> "Figure":
    """Draw one picture. node: its mapping in the sweep's file. Raises ConfigError where the runs
    lack what it shows."""
    from fedexp.papers import draw_kept, draw_paper

    kinds: dict[str, Callable[..., Figure]] = {
        "class_maps": draw_paper.class_maps,
        "class_curves": draw_paper.class_curves,
        "consistency": draw_paper.consistency,
        "curves": draw_paper.curves,
        "levels": draw_paper.levels,
        "data": draw_paper.data,
        "client_classes": draw_paper.client_classes,
        "client_class": draw_paper.client_class,
        "round_models": draw_paper.round_models,
        "round_forgetting": draw_paper.round_forgetting,
        "neurons": draw_paper.neurons,
        "noise": draw_kept.noise,
        "joint_tsne": draw_kept.joint_tsne,
    }
    options = {
        key: value for key, value in node.items() if key not in ("kind", "name", "only", "settings")
    }
    only, within = node.get("only"), node.get("settings")
    shown = [
        Setting(each.name, chosen, each.common)
        for each in settings
        if (within is None or each.name in within)
        and (
            chosen := tuple(
                m for m in each.methods if only is None or m.name.partition(AND)[0] in only
            )
        )
    ]
    if not shown:
        raise ConfigError(f"no run of {', '.join([*(within or ()), *(only or ())])} is finished")
    return kinds[str(node["kind"])](shown, title, **options)


def in_order(sweep: Sweep, field: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found by name in the order in which the sweep's file has these names in a
    field; others last."""
    every = [
        block.fields(each).get(field) for block in sweep.blocks for each in block.combinations()
    ]

    def place(name: str) -> int:
        known = name if name in every else name.partition(AND)[0]
        return every.index(known) if known in every else len(every)

    return dict(sorted(found.items(), key=lambda item: place(item[0])))


def labelled(sweep: Sweep, runs: Sequence[RunDirectory]) -> list[Setting]:
    """Return the runs by setting and method, as the fields of the sweep's file call them; those
    that it has not, by their overrides."""
    shared, same = shared_overrides(runs), set.intersection(*(set(run.overrides) for run in runs))
    axes = {key for block in sweep.blocks for key in block.axes}
    fixed = {text for block in sweep.blocks for text in block.fixed}
    found: dict[str, dict[str, list[RunDirectory]]] = {}
    for run, (setting, method) in zip(runs, names(runs), strict=True):
        cell = find_cell(sweep, run.overrides, same)
        method = displayed([method])[0]
        if cell and "method" in cell[1]:
            own = [text for text in others(named_overrides(run), axes, fixed) if text not in shared]
            method = AND.join([cell[1]["method"], *own])
        place = found.setdefault(cell[1].get("setting", setting) if cell else setting, {})
        place.setdefault(method, []).append(run)
    every = {method: runs for methods in found.values() for method in methods}
    numbers = {name: number for number, name in enumerate(in_order(sweep, "method", every))}
    common = " ".join(
        o for o in others(sorted(shared), axes, fixed) if o in named_overrides(runs[0])
    )
    return [
        Setting(
            setting,
            tuple(
                Method(m, sort_by_seed(found[setting][m]), numbers[m])
                for m in numbers
                if m in found[setting]
            ),
            common,
        )
        for setting in in_order(sweep, "setting", found)
    ]


def others(overrides: Sequence[str], axes: set[str], fixed: set[str]) -> list[str]:
    """Return those of some overrides that are the user's own, not the sweep's."""
    return [o for o in overrides if o.partition("=")[0] not in axes and normalise(o) not in fixed]
