"""Test formats, titles and style files of figures, and class names."""

import json
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from fedexp.analysis import draw_sweep
from fedexp.analysis.draw_sweep import sweep_pictures
from fedexp.analysis.sweep_figures import settings
from fedexp.cli.main import main
from fedexp.core.errors import ConfigError
from fedexp.figures import draw, list_figures, make_figures, read_settings
from fedexp.figures.load import load_run_data
from fedexp.figures.pictures import Pictures
from fedexp.figures.style import fitting, styled
from fedexp.rundir.sweeps import own_jobs
from fedexp_papers.analyses.draw import draw_analysis
from test_figures import ALL, CONFIG, make_run
from test_sweep_figures import make_run as make_job

ONE = {"curves"}  # of a run without losses, class accuracies and partition


def make_small(folder: Path, pictures: set[str] = ONE) -> None:
    """Write a run with one figure, or with all except that of local models."""
    make_run(folder, rounds=2, classes=3, clients=3, local=False)
    if pictures == ONE:
        (folder / "class_accuracy.csv").unlink()
        (folder / "partition.npz").unlink()
        (folder / "rounds.csv").write_text("round,test_accuracy,forgetting\n0,0.1,\n1,0.3,0.1\n")


@pytest.mark.parametrize(
    "pictures",
    [ONE, pytest.param(ALL - {"local_round"}, marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_figures_have_the_chosen_formats_titles_and_style(tmp_path, pictures):
    """Drawing a figure again gives the same file."""
    make_small(tmp_path, pictures)
    style = tmp_path / "paper.mplstyle"
    style.write_text(
        "figure.figsize: 4, 3\nsavefig.dpi: 100\naxes.prop_cycle: cycler('color', ['112233',"
        " '445566'])\n"
    )
    look = Pictures(format=("svg", "pdf", "png"), titles=False, style=str(style))
    paths = make_figures(tmp_path, look=look)
    assert {p.name for p in paths} == {
        f"{name}.{form}" for name in pictures for form in look.format
    }
    with Image.open(tmp_path / "figures" / "curves.png") as image:
        assert image.width == 400  # 4 inches of 100 dots
    svg = (tmp_path / "figures" / "curves.svg").read_text()
    assert "#112233" in svg
    assert "Accuracy and forgetting of the global model" not in svg
    assert (tmp_path / "figures" / "curves.pdf").read_bytes().startswith(b"%PDF")
    # formats that could hold the time
    before = {p: p.read_bytes() for p in paths if p.suffix != ".png"}
    again = make_figures(tmp_path, look=replace(look, format=("svg", "pdf")))
    assert {p: p.read_bytes() for p in again} == before
    make_figures(tmp_path, look=Pictures(format=("svg",)))
    assert (
        "Accuracy and forgetting of the global model"
        in (tmp_path / "figures" / "curves.svg").read_text()
    )
    assert matplotlib.rcParams["figure.figsize"][0] != 4, "the process keeps its style"


def test_size_and_colours_are_those_of_the_flags(tmp_path):
    """The accuracies 0 and 1 of two classes get the two ends of the colour map."""
    accuracy = np.array([[0.0, 1.0]] * 3)
    make_run(tmp_path, rounds=2, classes=2, accuracy=accuracy, local=False)
    style = tmp_path / "paper.mplstyle"
    style.write_text("savefig.dpi: 100\nfigure.figsize: 9, 9\nimage.cmap: jet\n")
    flags = ["--style", str(style), "--size", "3.4,2.0", "--colour-map", "gray", "--no-titles"]
    assert main(["figures", str(tmp_path), *flags]) == 0
    for path in (tmp_path / "figures").glob("*.png"):
        with Image.open(path) as image:
            assert image.size == (340, 200)
    with Image.open(tmp_path / "figures/class_accuracy.png") as image:
        counted = dict((colour, number) for number, colour in image.convert("RGB").getcolors(9999))
    assert counted[0, 0, 0] > 5000 < counted[255, 255, 255]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "3.4"], "figures.size=[3.4]: must be a width and a height"),
        (["--size", "0,2"], "figures.size=[0.0, 2.0]: must be a width and a height"),
        (["--size", "a,2"], "argument --size: a,2 must be two numbers, such as 3.4,2.0"),
        (["--colour-map", "greyy"], "figures.colour_map=greyy: must be a colour map of matplotlib"),
    ],
)
def test_wrong_size_or_colours_are_refused(tmp_path, capsys, flags, message):
    make_small(tmp_path)
    assert main(["figures", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_figures_follow_the_configuration(tmp_path, caplog):
    make_small(tmp_path)
    (tmp_path / "config.yaml").write_text(
        CONFIG + "figures: {draw: true, format: [pdf], titles: true, size: 3, style: gone}\n"
    )
    assert read_settings(tmp_path) == Pictures(format=("pdf",)), "only usable settings"
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["figures.style=gone", "figures.size=3"]
    (tmp_path / "config.yaml").write_text(CONFIG + "figures: {format: [pdf]}\n")
    assert {p.suffix for p in make_figures(tmp_path)} == {".pdf"}
    assert main(["figures", str(tmp_path), "--format", "svg,pdf", "--no-titles"]) == 0
    assert (tmp_path / "figures" / "curves.svg").exists()
    assert main(["figures", str(tmp_path), "--format", "jpg"]) == 2


def test_style_file_is_relative_to_the_directory_where_the_run_was_started(tmp_path, caplog):
    style = tmp_path / "here" / "paper.mplstyle"
    make_small(tmp_path / "run")
    style.parent.mkdir()
    style.write_text("savefig.dpi: 100\n")
    known = {"format": 2, "identity": "", "directory": str(style.parent), "shape": [], "parts": []}
    (tmp_path / "run" / "origin.json").write_text(json.dumps(known | {"values": {}}))
    (tmp_path / "run" / "config.yaml").write_text(CONFIG + "figures: {style: paper.mplstyle}\n")
    assert read_settings(tmp_path / "run") == Pictures(style=str(style))
    assert not caplog.records


def test_class_names_are_single_lines_without_mathematics(tmp_path):
    names = ["", "cat", "a$b$ c\td"]
    make_run(tmp_path / "run", classes=3, local=False, names=names)
    with styled():
        figure = draw.data_distribution(load_run_data(tmp_path / "run"), np.ones((3, 3), int))
        FigureCanvasAgg(figure).draw()
    shown = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert shown == ["0", "cat", "a$b$ c d"]


def test_figures_fit_into_a_column_of_a_paper(tmp_path):
    """Panels, titles and legends adapt to 3.4 inches, and font.size changes all text."""
    (tmp_path / "narrow.mplstyle").write_text("figure.figsize: 3.4, 2.5\nfont.size: 5\n")
    make_run(tmp_path / "run", rounds=2, classes=3, clients=3, local=True)
    for name in ("fedavg", "fedntd", "fedprox"):
        make_job(tmp_path / "sweep", ["dataset=digits", f"algorithm={name}"], local=True)
    with styled(Pictures(style=str(tmp_path / "narrow.mplstyle"))):
        of_run = list_figures(load_run_data(tmp_path / "run"))
        drawn = {
            name: make() for name, make in (*of_run, *sweep_pictures(own_jobs(tmp_path / "sweep")))
        }
        for name, figure in drawn.items():
            assert figure.get_figwidth() == 3.4, name
            figure.draw_without_rendering()
            box = figure.get_tightbbox()
            assert box.x0 > -0.05, name
            assert box.x1 < 3.45, name
            assert max(text.get_fontsize() for text in figure.findobj(Text)) <= 5, name
    assert drawn.keys() > {"curves", "local_round", "digits_lda_class_accuracy"}


def test_panels_have_room_beside_their_legends(tmp_path):
    make_run(tmp_path, rounds=2, classes=3, clients=3, local=True)
    with styled(Pictures(titles=False, size=(3.4, 2.0))):
        figure = dict(list_figures(load_run_data(tmp_path)))["curves"]()
        figure.suptitle("").set_in_layout(False)
        figure.set_size_inches(3.4, 2.0)
        figure.draw_without_rendering()
    assert min(axes.get_position().height for axes in figure.axes) > 0.25


def test_classes_are_named_by_the_option(tmp_path):
    make_run(tmp_path, rounds=2, classes=3, clients=3, local=False)
    look = Pictures(format=("svg",), classes=("cat", "dog", "bird"))
    make_figures(tmp_path, look=look)
    assert "bird" in (tmp_path / "figures" / "class_accuracy.svg").read_text()
    with pytest.raises(ConfigError, match=r"figures.classes=\['cat'\]: must be a list of 3 names"):
        make_figures(tmp_path, look=replace(look, classes=("cat",)))


def overlapping(boxes):
    """Return the pairs of boxes that cover each other by more than half a dot."""
    small = [box.padded(-0.25) for box in boxes if box.width > 1 and box.height > 1]
    return [(a, b) for i, a in enumerate(small) for b in small[:i] if a.overlaps(b)]


def assert_readable(figure, size):
    """Check that panels, with their labels, and the labels of an axis do not overlap.

    The figure gets its size again, as by `save_all`.
    """
    figure.set_size_inches(size or figure.get_size_inches())
    figure.draw_without_rendering()
    assert not overlapping([axes.get_tightbbox() for axes in figure.axes if axes.axison])
    for axes in figure.axes:
        assert axes.get_window_extent().width > 20 < axes.get_window_extent().height or (
            axes is figure.axes[-1]  # the colour bar
        )
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            shown = [
                tick.label1.get_window_extent()
                for tick in axis.get_major_ticks()
                if low <= tick.get_loc() <= high and tick.label1.get_visible()
            ]
            assert not overlapping(shown)


@pytest.mark.parametrize("size", [(3.4, 2.0), (3.4, 2.6), ()], ids=str)
@pytest.mark.parametrize(("methods", "classes"), [(3, 10), (9, 10), (9, 100)])
def test_heat_maps_of_several_methods_are_readable(tmp_path, methods, classes, size):
    names = [
        "fedavg",
        "fedntd",
        "scaffold",
        "fedprox",
        "moon",
        "flashback",
        "feddf",
        "fedreg",
        "fednova",
    ]
    for name in names[:methods]:
        make_job(tmp_path, [f"algorithm={name}"], classes=classes)
    (setting,) = settings(own_jobs(tmp_path))
    with styled(Pictures(size=size)):
        assert_readable(draw_sweep.class_accuracy(setting, normalised=True), size)


@pytest.mark.parametrize("size", [(3.4, 2.0), (3.4, 2.6)], ids=str)
def test_analysis_of_local_epochs_is_readable(size):
    keys = pd.MultiIndex.from_product([range(8), range(6)], names=["round", "epoch"])
    columns = ["in_local_accuracy", "out_local_accuracy", "train_accuracy"]
    table = pd.DataFrame(0.5, keys, columns).reset_index()
    title = "fedavg on cifar10, sharding shards_per_client=2, 100 clients, seed 0"
    with styled(Pictures(size=size)):
        assert_readable(draw_analysis("local_epochs", title, table), size)


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (3, 3), (5, 3), (7, 4), (9, 3)])
def test_rows_of_panels_are_equally_long(count, columns):
    with styled():
        assert fitting(count, 1.6, most=4) == columns


@pytest.mark.parametrize("methods", [3, 9])
def test_curves_of_a_sweep_fit_into_a_small_figure(methods, tmp_path):
    """At 3.4 x 2.0 inches, panels are side by side, no text is cut, and the legend is small."""
    names = ["fedavg", "fedntd", "fedprox", "moon", "scaffold", "flashback", "fedka", "fedlc"]
    for name in [*names, "cfed"][:methods]:
        for seed in (0, 1):
            make_job(tmp_path, ["dataset=digits", f"algorithm={name}"], seed=seed, rounds=20)
    with styled(Pictures(size=(3.4, 2.0))):
        (_, draw_curves), *_ = sweep_pictures(own_jobs(tmp_path))
        figure = draw_curves()
        figure.draw_without_rendering()
        boxes = [axes.get_position() for axes in figure.axes]
        assert len({round(box.y0, 3) for box in boxes}) == 1
        assert min(2.0 * box.height for box in boxes) > 0.7
        around = figure.get_tightbbox()
        assert around.x0 > -0.05
        assert around.y0 > -0.05
        assert around.x1 < 3.45
        assert around.y1 < 2.05
        (legend,) = figure.legends
        assert legend.get_window_extent().height / figure.dpi < 0.5
        labels = [axes.yaxis.label.get_window_extent() for axes in figure.axes]
        assert all(0 < box.y0 < box.y1 < 2.0 * figure.dpi for box in labels)


def test_curves_are_above_each_other_if_there_is_room(tmp_path):
    make_job(tmp_path, ["dataset=digits", "algorithm=fedavg"])
    for size in ((), (6, 5)):
        with styled(Pictures(size=size)):
            (_, draw_curves), *_ = sweep_pictures(own_jobs(tmp_path))
            assert len({axes.get_subplotspec().rowspan.start for axes in draw_curves().axes}) == 2


def test_settings_of_the_users_matplotlibrc_do_not_prevent_figures(tmp_path):
    """Only its fonts are used, which a language may need. Figures do not need LaTeX."""
    make_small(tmp_path)
    rc = {"text.usetex": True, "savefig.bbox": "tight", "font.family": ["DejaVu Serif"]}
    with matplotlib.rc_context(rc):
        (path,) = make_figures(tmp_path, look=Pictures(size=(3.0, 2.0)))
        assert matplotlib.rcParams["text.usetex"], "the user's settings are restored"
        with styled():
            assert matplotlib.rcParams["font.family"] == ["DejaVu Serif"]
    with Image.open(path) as image:
        assert image.width == 1.5 * image.height, "not cut"
