"""Analyses of saved models: each measure against numbers by hand, and on one run."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.integrate import trapezoid

import fedexp
from fedexp.analysis.sweep_figures import Method, Setting
from fedexp.core.errors import ConfigError
from fedexp.core.storage import read_csv
from fedexp.data import augment
from fedexp.rundir import kept_models
from fedexp.rundir.kept_models import KeptModel
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.command import main, make_parser
from fedexp_papers.figures import draw_picture
from fedexp_papers.posthoc import features, loss, vectors
from fedexp_papers.posthoc.base import Subject, training_examples
from fedexp_papers.posthoc.hessian import largest_eigenvalues, loss_hessian
from fedexp_papers.posthoc.loss import measure_noise, measure_surface, plane_around
from quick_runs import FEDERATION
from toy_federation import PLAIN, make_simulation, play

HAND = {"w": torch.tensor([[3.0, 4.0], [0.0, 2.0]]), "b": torch.tensor([1.0, 1.0])}


# --- directions


def test_filter_normalisation_equals_hand_calculation():
    """Rows of d get the norms of w's rows: (1, 0) becomes 5 long, (0, 0) stays, the vector becomes
    0, and (6, 8) is halved to length 5."""
    d = {"w": torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "b": torch.tensor([7.0, 7.0])}
    found = vectors.filter_normalised(d, HAND)
    assert found["w"].tolist() == [[5.0, 0.0], [0.0, 0.0]]
    assert found["b"].tolist() == [0.0, 0.0]
    again = vectors.filter_normalised(
        {"w": torch.tensor([[6.0, 8.0], [0.0, -1.0]]), "b": d["b"]}, HAND
    )
    assert again["w"].tolist() == [[3.0, 4.0], [0.0, -2.0]]


def test_plane_through_three_models_equals_hand_calculation():
    """w_0 = (1, 0, 0), w_1 = (5, 3, 0), w_2 = (1, 5, 12): u = (4, 3, 0) / 5; (w_2 - w_0) u = 3, and
    the rest is (0, 5, 12) - 3 u = (-2.4, 3.2, 12), of length sqrt(5.76 + 10.24 + 144) =
    sqrt(160)."""
    points = [
        {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0])},
        {"a": torch.tensor([5.0, 3.0]), "b": torch.tensor([0.0])},
        {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([12.0])},
    ]
    u, v, positions = vectors.plane_through(points)
    torch.testing.assert_close(vectors.flatten(u), torch.tensor([0.8, 0.6, 0.0]))
    torch.testing.assert_close(vectors.flatten(v), torch.tensor([-2.4, 3.2, 12.0]) / 160**0.5)
    np.testing.assert_allclose(positions, [[0, 0], [5, 0], [3, 160**0.5]], rtol=1e-12)
    for point, (x, y) in zip(points, positions.tolist(), strict=True):
        torch.testing.assert_close(
            vectors.flatten(vectors.move(points[0], [(x, u), (y, v)])), vectors.flatten(point)
        )
    with pytest.raises(ValueError, match="on a line"):
        vectors.plane_through([points[0], points[1], vectors.move(points[0], [(2.0, u)])])
    with pytest.raises(ValueError, match="equal"):
        vectors.plane_through([points[0], points[0], points[2]])


# --- a model of the small federation


def toy_subject(model=None, rounds=2):
    """The toy model after some rounds in float64, and the 20 test images."""
    simulation = make_simulation(model=model, local=PLAIN)
    state = play(simulation, rounds)
    kept = KeptModel(rounds, state.server["params"], state.server["buffers"])
    return Subject(SimpleNamespace(directory=Path("toy")), simulation.runtime, kept)


@pytest.fixture(scope="module")
def toy():
    return toy_subject()


def dense_hessian(subject):
    """The Hessian of the mean cross-entropy, by torch.func.hessian of the flat parameters."""
    params = subject.load(subject.model)
    x, y = subject.runtime.load_test(torch.arange(20))

    def loss(flat):
        logits = subject.runtime.net(vectors.unflatten(flat, params), x).logits
        return torch.nn.functional.cross_entropy(logits, y)

    return torch.func.hessian(loss)(vectors.flatten(params))


def test_eigenvalues_equal_those_of_the_dense_hessian(toy):
    dense = dense_hessian(toy)
    params = toy.load(toy.model)
    vector = torch.linspace(-1, 1, len(dense), dtype=torch.float64)
    torch.testing.assert_close(
        loss_hessian(toy, params)(vector), dense @ vector, rtol=1e-9, atol=1e-12
    )
    values, vectors, residuals = largest_eigenvalues(toy, 4, tolerance=1e-10)
    wanted, directions = np.linalg.eigh(dense.numpy())
    np.testing.assert_allclose(values, wanted[::-1][:4], rtol=1e-8)
    overlaps = abs(np.sum(vectors * directions[:, ::-1][:, :4], 0))
    np.testing.assert_allclose(overlaps, 1, atol=1e-6)
    assert residuals.max() < 1e-7


def test_surface_equals_the_loss_at_each_point(toy):
    """The middle is the model itself; a corner is the model moved along both directions."""
    plane = plane_around(toy, "random", points=3, span=0.5, seed=3)
    surface = measure_surface(toy, plane).set_index(["x", "y"])
    params = toy.load(toy.model)
    middle = toy.runtime.evaluate(params)
    assert surface.loc[0, 0]["loss"] == pytest.approx(float(middle.loss), rel=1e-12)
    assert surface.loc[0, 0]["accuracy"] == int(middle.class_correct.sum()) / 20
    corner = {k: v + 0.5 * plane.u[k] - 0.5 * plane.v[k] for k, v in params.items()}
    wanted = float(toy.runtime.evaluate(corner).loss)
    assert surface.loc[0.5, -0.5]["loss"] == pytest.approx(wanted, rel=1e-9)


def losses(subject, *arguments):
    """The losses under noise, [draws, strengths]."""
    return measure_noise(subject, *arguments).pivot(index="draw", columns="strength")["loss"]


def test_noise_is_added_to_all_parameters(toy):
    """w + s e: without noise, exactly the model's loss; otherwise the loss at the sum. A draw has
    the same e at all strengths."""
    params = toy.load(toy.model)
    own = toy.runtime.evaluate(params)
    found = losses(toy, [0.0, 0.1, 0.3], 2, "absolute", 3)
    assert found.shape == (2, 3)
    assert (found[0.0] == float(own.loss)).all()
    for number in (0, 1):
        e = vectors.gaussian(params, 3, number)
        for strength in (0.1, 0.3):
            at = {name: value + strength * e[name] for name, value in params.items()}
            wanted = float(toy.runtime.evaluate(at).loss)
            assert found.loc[number, strength] == pytest.approx(wanted, rel=1e-12)
    assert len(np.unique(found)) == 5
    np.testing.assert_array_equal(losses(toy, [0.3], 2, "absolute", 3), found[[0.3]])
    assert not np.isin(losses(toy, [0.3], 2, "absolute", 4), found).any()


def test_scale_of_noise_equals_hand_calculation(toy):
    """Absolute: standard normal numbers. Relative: times sqrt((9 + 16 + 0 + 4) / 4) and sqrt((1 +
    1) / 2)."""
    e = vectors.gaussian({"w": torch.zeros(200, 100)}, seed=1, number=0)["w"]
    # 3 of 1 / sqrt(20,000)
    assert (e.mean().item(), e.std().item()) == pytest.approx((0, 1), abs=0.02)
    d = {"w": torch.tensor([[1.0, -2.0], [0.0, 4.0]]), "b": torch.tensor([3.0, 5.0])}
    found = vectors.relative_to(HAND, d)
    torch.testing.assert_close(found["w"], d["w"] * 7.25**0.5)
    assert found["b"].tolist() == [3, 5]
    params = toy.load(toy.model)
    e = vectors.relative_to(params, vectors.gaussian(params, 0, 0))
    at = {name: value + 0.2 * e[name] for name, value in params.items()}
    found = losses(toy, None, 1, "relative", 0)
    np.testing.assert_allclose(found.columns, np.arange(11) / 20)
    assert found.iloc[0, 4] == pytest.approx(float(toy.runtime.evaluate(at).loss), rel=1e-12)


# --- features


def test_angles_and_densities_equal_hand_calculation():
    """A single angle 0 with h = 0.1: the density there is 1 / (0.1 sqrt(2 pi)) = 3.98942, and at
    0.1 it is this times exp(-1/2). The kernel is wrapped: an angle just below pi counts just above
    -pi."""
    found = features.angles(np.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]]))
    np.testing.assert_allclose(found, [0, np.pi / 2, np.pi, np.nan])
    at = features.circle_density(np.array([0.0, np.nan]), np.array([0.0, 0.1]))
    np.testing.assert_allclose(at, [3.9894228, 3.9894228 * np.exp(-0.5)], rtol=1e-7)
    wrapped = features.circle_density(np.array([np.pi - 0.05]), np.array([-np.pi + 0.05]))
    np.testing.assert_allclose(wrapped, 3.9894228 * np.exp(-0.5), rtol=1e-7)
    grid = np.linspace(-np.pi, np.pi, 2001)
    spread = features.circle_density(np.random.default_rng(0).uniform(-3, 3, 40), grid)
    assert trapezoid(spread, grid) == pytest.approx(1, abs=1e-9)
    assert np.isnan(features.circle_density(np.empty(0), grid)).all()


# --- the command

OPTIONS = [*FEDERATION, "local.batch_size=60", "hardware.precision=fp64"]
OPTIONS += ["rounds=2", "keep_local_models=[2]", "checkpoint_interval=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two rounds of a tiny network with features on the circle, with the local models of round
    2."""
    model = ["model=cnn_circle", "model.channels=[4,4]", "model.hidden=[16]"]
    return fedexp.run([*OPTIONS, *model], directory=tmp_path_factory.mktemp("runs") / "run")


def tables(run, capsys, *arguments):
    """Return the csv files that a call writes, the paths and the printed text. No file is empty."""
    assert main(["analyse", str(run.directory), *arguments]) == 0
    printed = capsys.readouterr().out
    paths = [Path(line.strip()) for line in printed.splitlines() if line.startswith("  ")]
    assert all(path.stat().st_size > 0 for path in paths)
    return [read_csv(path) for path in paths if path.suffix == ".csv"], paths, printed


@pytest.fixture(scope="module")
def others(run, tmp_path_factory):
    """A copy of the run in which the clients' models are permuted, and a run of another model on
    another partition."""
    folder = tmp_path_factory.mktemp("others")
    copy = Path(shutil.copytree(run.directory, folder / "copy"))
    clients = run.kept_clients(2)
    for client, other in zip(clients, [*clients[1:], clients[0]], strict=True):
        model = kept_models.load(run.directory, 2, other)
        kept_models.save(copy, 2, {"params": model.params, "buffers": model.buffers}, client)
    changes = ["algorithm=fedntd", "model=cnn", "seeds.partition=5"]
    wide = fedexp.run(
        [*OPTIONS, *changes, "model.channels=[4,4]", "model.hidden=[16]"], directory=folder / "wide"
    )
    return copy, wide.directory


def test_tsne_shows_the_models_of_two_runs(run, others, capsys, monkeypatch):
    """With an embedding that returns the first two features, each model's points are its
    features."""
    monkeypatch.setattr(features, "embed", lambda found, *_: [each[:, :2] for each in found])
    (found,), (_, picture), _ = tables(
        run, capsys, "tsne", "--examples", "12", "--with", str(others[0])
    )
    assert picture.name == "tsne_round2_with_copy.png"
    clients = run.kept_clients(2)
    models = ["global, round 1", *(f"client {c}" for c in clients), "global, round 2"]
    assert list(found["model"].unique()) == [
        f"{name}: {model}" for name in ("run", "copy") for model in models
    ]
    places = {name: group[["x", "y"]].to_numpy() for name, group in found.groupby("model")}
    subject = subject_of(run, 12)
    for i, client in enumerate(clients):
        mine = subject.features(kept_models.load(run.directory, 2, client))
        np.testing.assert_allclose(places[f"run: client {client}"], mine, rtol=1e-9)
        np.testing.assert_allclose(places[f"copy: client {clients[i - 1]}"], mine, rtol=1e-9)
    node = {"kind": "tsne", "per": "setting", "clients": 1, "examples": 12}
    figure = draw_picture(node, settings_of(run.directory, others[0]), "FedNTD Fig. 21")
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[1].lines}
    np.testing.assert_allclose(lines["B: 1 local model"], places[f"copy: client {clients[0]}"])
    np.testing.assert_allclose(lines["A: 2 global models"][12:], places["run: global, round 2"])
    with pytest.raises(ConfigError, match="no finished run has the settings and the methods"):
        draw_picture(node, [], "FedNTD Fig. 21")


def subject_of(run, examples):
    """Return the subject of an analysis of round 2 with this number of test examples."""
    flags = ["analyse", str(run.directory), "tsne", "--examples", str(examples)]
    runs = {"": RunDirectory(run.directory)}
    return features.load_subjects(runs, None, make_parser().parse_args(flags))[""]


def settings_of(*directories):
    """Return one setting with a method (A, B, ...) for each run."""
    methods = (
        Method(name, (RunDirectory(path),)) for name, path in zip("AB", directories, strict=False)
    )
    return [Setting("s=2", tuple(methods), "")]


def test_noise_figure_of_a_sweep_shows_global_and_local_models(run, others):
    """For the global model and for the first client's model, which differs in the copy."""
    small = {"kind": "noise", "examples": 20, "device": "cpu", "draws": 2, "strengths": "0,0.2"}
    subject = subject_of(run, 20)
    settings, clients = settings_of(run.directory, others[0]), run.kept_clients(2)
    same = draw_picture(small, settings, "FedNTD Fig. 14").axes[0].containers
    assert same[0].get_label() == "A, global, round 2"
    wanted = losses(subject, [0.0, 0.2], 2, "absolute", 0).mean()
    for line, *_ in (each.lines for each in same):
        np.testing.assert_allclose(line.get_xydata().T, [[0, 0.2], wanted], rtol=1e-12)
    local = draw_picture(small | {"client": "first"}, settings, "FedNTD Fig. 14").axes[0].containers
    for (line, *_), client in zip((each.lines for each in local), clients[:2], strict=True):
        params = subject.load(kept_models.load(run.directory, 2, client))
        wanted = float(subject.runtime.evaluate(params).loss)
        assert line.get_ydata()[0] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "name", "columns"),
    [
        (
            "loss_plane --directions models --points 3 --data train --format svg",
            "loss_plane_round2_models",
            "x,y,loss,accuracy",
        ),
        ("hessian --eigenvalues 2 --examples 30", "hessian_round2", "number,eigenvalue,residual"),
        ("hypersphere --examples 40", "hypersphere_round2", "model,class,angle,density"),
        ("tsne --examples 12 --perplexity 5", "tsne_round2", "round,model,example,class,x,y"),
    ],
)
def test_each_kind_writes_a_table_and_a_figure(run, capsys, arguments, name, columns):
    augment._scale_and_shift.cache_clear()  # as in a new process
    (table,), paths, printed = tables(run, capsys, *arguments.split())
    assert {path.stem for path in paths} == {name}
    assert {path.suffix for path in paths} - {".npz"} == {
        ".csv",
        ".svg" if "svg" in arguments else ".png",
    }
    assert ",".join(table) == columns
    if "model" in table:
        clients = [f"client {c}" for c in run.kept_clients(2)]
        shown = ["global, round 1", *clients, "global, round 2"]
        assert set(table["model"]) <= set(shown)
        assert {shown[0], shown[-1]} <= set(table["model"])
    if "eigenvalue" in table:
        assert f"{table['eigenvalue'][0]:.5g}" in printed


def test_analyses_agree_with_the_results_of_the_run(run, capsys):
    (plane,), paths, _ = tables(run, capsys, "loss_plane", "--points", "3")
    assert {path.stem for path in paths} == {"loss_plane_round2_random"}
    middle = plane.query("x == 0 and y == 0").iloc[0]
    assert middle["loss"] == pytest.approx(run.rounds["test_loss"].iloc[-1], rel=1e-9)
    assert middle["accuracy"] == pytest.approx(run.summary["accuracy"], abs=1e-12)
    (noise,), paths, printed = tables(run, capsys, "noise", "--strengths", "0,0.1", "--draws", "3")
    assert {path.name for path in paths} == {f"noise_round2_absolute.{e}" for e in ("csv", "png")}
    assert noise["draw"].tolist() == [0, 0, 1, 1, 2, 2]
    assert noise["loss"].tolist()[::2] == [run.rounds["test_loss"].iloc[-1]] * 3
    assert noise["accuracy"][0] == run.summary["accuracy"]
    assert f"noise 0.1: loss {noise.query('strength == 0.1')['loss'].mean():.4f}" in printed
    (neurons,), paths, printed = tables(run, capsys, "neurons")
    assert {path.name for path in paths} == {f"neurons_round2.{e}" for e in ("csv", "png")}
    classes = neurons.pivot(index="neuron", columns="model", values="class")
    local = classes.filter(like="client")
    agreement = local.eq(classes["global, round 1"], axis=0).to_numpy().mean()
    assert f"{agreement:.4f} of the neurons keep their class" in printed


def test_noise_under_which_a_loss_is_undefined_has_no_mean(run, capsys, monkeypatch):
    rows = {"draw": [0, 0, 1, 1], "strength": [0, 0.1, 0, 0.1], "loss": [1, 2, 1, np.nan]}
    table = pd.DataFrame(rows | {"accuracy": 0.5})
    monkeypatch.setattr(loss, "measure_noise", lambda *_: table)
    *_, printed = tables(run, capsys, "noise", "--draws", "2")
    assert "noise 0.1: loss nan, accuracy 0.5000 (mean of 2 draws)" in printed
    axes = loss.draw_noise({"": table}, "absolute", "title").axes[0]
    assert axes.containers[0].lines[0].get_xdata().tolist() == [0]


def test_examples_of_a_client_are_those_of_the_round(tmp_path):
    options = [*OPTIONS, "schedule.partition={2:iid}", "model.channels=[4]", "model.hidden=[8]"]
    found = RunDirectory(fedexp.run(options, directory=tmp_path / "run").directory)
    for number, partition in zip((1, 2), found.partitions, strict=True):
        own = training_examples(found, "3", number)
        np.testing.assert_array_equal(own, np.sort(partition.parts[3]))


def test_neurons_need_the_model_from_before_the_round(run, tmp_path, capsys):
    """Without it, the agreement would be that of two clients."""
    copy = Path(shutil.copytree(run.directory, tmp_path / "copy"))
    (copy / kept_models.file_of_round(1)).unlink()
    (copy / "checkpoint" / "previous.pt").unlink()
    assert main(["analyse", str(copy), "neurons"]) == 2
    assert "the global model from before this round were not saved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["hessian", "--round", "9"],
            "the global model from round 9 was not saved; saved rounds: 1, 2",
        ),
        (["hessian", "--data", "8"], "--data 8: must be test, train or the number of a client"),
        (["loss_plane", "--points", "1"], "--points: 1: must be a whole number, at least 2"),
        (["tsne", "--round", "1,x"], "argument --round: x: must be a whole number, at least 0"),
        (["noise", "--client", "x"], "argument --client: x: must be first or the number of a"),
        (["noise", "--client", "first", "--round", "1"], "no local models from round 1 were saved"),
        (["tsne", "--round", "0"], "the global model from round 0 was not saved"),
        (
            ["loss_plane", "--directions", "models", "--models", "global,1"],
            "three different names, each of them global",
        ),
        (
            ["loss_plane", "--directions", "models", "--round", "1"],
            "needs two local models from round 1, but only 0 were saved",
        ),
        (["noise", "--strengths", "0,-1"], "argument --strengths: "),
        (["neurons", "--round", "1"], "the local models from round 1 or the global model from"),
    ],
)
def test_bad_input_gives_one_message(run, arguments, words, capsys):
    before = sorted(run.directory.rglob("*"))
    assert main(["analyse", str(run.directory), *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not said.out
    assert sorted(run.directory.rglob("*")) == before
