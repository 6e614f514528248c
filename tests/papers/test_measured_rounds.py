"""Analyses in a run: measures worked by hand, and the tables and figures of a run."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from analysed import EVERY, measure
from fedexp.algorithms.fedmultihead import FedMultiHead
from fedexp.algorithms.fedprox import FedProx
from fedexp.algorithms.fedsam import FedSAM
from fedexp.cli import main
from fedexp.config.build import build
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.figures.style import styled
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.metrics.record import Record
from fedexp.models.own import LogitsOnly
from fedexp.rundir import files
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.base import past_rounds
from fedexp.training.rounds import play_round
from fedexp_papers.analyses import weight_divergence as divergence
from fedexp_papers.analyses.cka import CKA, linear_cka
from fedexp_papers.analyses.draw import draw_analysis
from fedexp_papers.analyses.gradient_diversity import (
    GradientDiversity,
    local_gradients,
    squared_means,
)
from fedexp_papers.analyses.local_epochs import LocalEpochs
from fedexp_papers.analyses.weight_divergence import WeightDivergence
from fedexp_papers.command import main as papers
from fedexp_papers.pictures import before_local_after
from quick_runs import SMALL
from toy_federation import (
    ENGINES,
    LOCAL,
    PAIR,
    TWO_TASKS,
    Normed,
    SoftmaxRegression,
    composed,
    make_simulation,
    random,
)

OTHERS = [name for name in ENGINES if name not in PAIR]
# of those beside the sequential one, two start processes
other_engines = pytest.mark.parametrize(
    "engine",
    ["vectorised", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
# Two layers, three clients: conv.weight [3, 2], conv.bias [3, 1] and head [3, 1].
REFERENCE = {
    "conv.weight": torch.tensor([1.0, 2.0]),
    "conv.bias": torch.tensor([0.0]),
    "head": torch.tensor([5.0]),
}
MODELS = {
    "conv.weight": torch.tensor([[4.0, 2.0], [1.0, 2.0], [1.0, -1.0]]),
    "conv.bias": torch.tensor([[4.0], [0.0], [0.0]]),
    "head": torch.tensor([[5.0], [5.0], [9.0]]),
}
REFERENCE, MODELS = (
    tree.map(lambda leaf: leaf.to(torch.float64), each) for each in (REFERENCE, MODELS)
)


def plain(values):
    return {layer: value.tolist() for layer, value in values.items()}


def test_divergence_from_the_global_model_equals_hand_calculation():
    """Differences: client 0 (3, 0), 4 and 0; client 1 none; client 2 (0, -3), 0 and 4. The total L2
    norm is sqrt(9 + 16) = 5."""
    assert plain(divergence.from_global(MODELS, REFERENCE)) == {
        "conv": [7, 0, 3],
        "head": [0, 0, 4],
        "total": [7, 0, 7],
    }
    found = plain(divergence.from_global(MODELS, REFERENCE, "l2"))
    assert found == {"conv": [5, 0, 3], "head": [0, 0, 4], "total": [5, 0, 5]}


def test_divergence_from_other_clients_equals_hand_calculation():
    """Client 1 equals the global model, so its distance to both others is 7; clients 0 and 2 differ
    by (3, 3), 4 and 4, together 14."""
    assert plain(divergence.from_others(MODELS))["total"] == [(7 + 14) / 2, 7, (14 + 7) / 2]
    # L2: client 1 is 5 from both; 0 and 2: sqrt(9 + 9 + 16 + 16) = sqrt(50).
    expected = [(5 + math.sqrt(50)) / 2, 5, (5 + math.sqrt(50)) / 2]
    assert plain(divergence.from_others(MODELS, "l2"))["total"] == pytest.approx(
        expected, rel=1e-15
    )
    assert math.isnan(divergence.from_others(tree.map(lambda leaf: leaf[:1], MODELS))["total"][0])


def test_distribution_distance_equals_hand_calculation():
    """Accuracies 0.6, 0.2 and nan (absent class) give shares 3/4 and 1/4; the clients' shares are
    (1, 0) and (1/2, 1/2), and the third client has half of the absent class. If all accuracies are
    0, so are the shares."""
    counts = np.array([[4, 0, 0], [3, 3, 0], [5, 0, 5]])
    found = divergence.distribution_distance(np.array([0.6, 0.2, np.nan]), counts)
    np.testing.assert_allclose(found, [0.5, 0.5, 0.25 + 0.25 + 0.5], rtol=1e-15)
    np.testing.assert_array_equal(divergence.distribution_distance(np.zeros(3), counts), [1, 1, 1])


def test_gradient_diversity_equals_hand_calculation():
    """Orthogonal gradients (3, 0) and (0, 4): mean square 25/2, mean (1.5, 2) with square 25/4, so
    2; equal gradients: 1."""
    gradients = {
        "a.weight": torch.tensor([[3.0, 0.0], [0.0, 4.0]]),
        "b": torch.tensor([[2.0], [2.0]]),
    }
    above, below = map(plain, squared_means(gradients))
    assert above == {"a": 25 / 2, "b": 4, "total": 25 / 2 + 4}
    assert below == {"a": 25 / 4, "b": 4, "total": 25 / 4 + 4}
    # Weights 3 and 1: mean square 3/4 * 9 + 1/4 * 16, mean (9/4, 1).
    above, below = map(plain, squared_means(gradients, torch.tensor([3, 1])))
    assert (above["a"], below["a"]) == pytest.approx((27 / 4 + 4, 81 / 16 + 1), rel=1e-15)


def test_client_gradient_uses_all_examples_of_the_client():
    """Softmax regression by its formula: dL/dW = mean_i (softmax(W x_i + b) - onehot(y_i))
    x_i^T."""
    simulation = make_simulation(model=SoftmaxRegression())
    runtime, info = simulation.runtime, simulation.stages[0].federation
    found = local_gradients(runtime, simulation.initial_state().server, info.parts)
    weight, bias = (simulation.initial[f"classifier.{name}"] for name in ("weight", "bias"))
    for client, part in enumerate(info.parts):
        x, y = runtime.load_train(torch.from_numpy(part), None)
        x = x.flatten(1)
        error = (x @ weight.T + bias).softmax(1) - torch.nn.functional.one_hot(y, len(bias))
        torch.testing.assert_close(found["classifier.weight"][client], error.T @ x / len(x))
        torch.testing.assert_close(found["classifier.bias"][client], error.mean(0))


def with_engine(engine, *arguments, **options):
    simulation = make_simulation(*arguments, **options)
    object.__setattr__(simulation, "engine", ENGINES[engine])
    return simulation


DIVERGENCE, DIVERSITY = WeightDivergence(**EVERY), GradientDiversity(**EVERY)
EPOCHS = LocalEpochs(between=True, clients=None, **EVERY)


@other_engines
@pytest.mark.parametrize(
    "algorithm", [FedProx(mu=0.1), FedSAM(rho=0.1)], ids=["fused", "own local step"]
)
def test_analyses_agree_on_all_engines_and_do_not_change_training(algorithm, engine):
    analyses = (DIVERGENCE, DIVERSITY, replace(EPOCHS, clients=3))
    _, *expected = measure(make_simulation(algorithm), *analyses)
    result, *found = measure(with_engine(engine, algorithm), *analyses)
    for rows, others, analysis in zip(found, expected, analyses, strict=True):
        assert set(rows[0]) == set(analysis.columns)
        pd.testing.assert_frame_equal(
            pd.DataFrame(rows), pd.DataFrame(others), rtol=1e-9, atol=1e-12
        )
    total = [row["client"] for row in found[0] if row["layer"] == "total"]
    assert total == list(result.cohort.clients)
    assert list(dict.fromkeys(row["client"] for row in found[2])) == total[:3]
    simulation = with_engine(engine, algorithm)
    without = play_round(simulation, simulation.initial_state())
    assert result.losses == without.losses
    for one, other in zip(tree.leaves(result.server), tree.leaves(without.server), strict=True):
        assert torch.equal(one, other)


def test_tracker_values_are_means_over_clients():
    """Means of the finite values of the whole model."""
    keys = ("layer", "l1", "l2", "others_l1", "others_l2", "distribution_distance")
    rows = [
        dict(zip(keys, (layer, l1, math.nan, 1.0, math.inf, 0.5), strict=True))
        for layer, l1 in (("total", 2.0), ("conv", 100.0), ("total", 4.0))
    ]
    found = DIVERGENCE.round_means(rows)
    assert found["weight_divergence_l1"] == 3.0
    assert found.keys() == {
        *("weight_divergence_l1", "weight_divergence_others_l1", "distribution_distance")
    }


def test_analysis_is_due_in_chosen_rounds_or_every_nth_and_the_last():
    analysis = WeightDivergence(rounds=None, every=4)
    assert [n for n in range(1, 11) if analysis.is_due(n, 10)] == [4, 8, 10]
    assert [n for n in range(1, 11) if WeightDivergence(rounds=[1, 9], every=4).is_due(n, 10)] == [
        1,
        9,
    ]


def built_from(*overrides):
    return build(composed(*overrides))


def test_several_analyses_can_be_chosen_and_have_separate_options():
    two = "analysis=[weight_divergence,gradient_diversity]"
    parts = built_from(two, "analysis.gradient_diversity.rounds=[2]").analysis
    assert [type(part) for part in parts] == [WeightDivergence, GradientDiversity]
    assert [part.rounds for part in parts] == [None, [2]]
    assert built_from("analysis=none").analysis == []


def test_message_names_the_option_with_the_invalid_value():
    with pytest.raises(ConfigError, match=r"^analysis.cka.rounds=\[0\]: must be a list of"):
        built_from("analysis=cka", "analysis.cka.rounds=[0]")


@pytest.mark.parametrize(
    ("analysis", "simulation", "message"),
    [
        (
            WeightDivergence(rounds=[1, 4], every=1),
            {},
            r"analysis.weight_divergence.rounds: round 4 is after the last round \(rounds=3\)",
        ),
        (
            DIVERSITY,
            {"algorithm": FedMultiHead(), "scenario": TWO_TASKS, "sizes": (2, 3)},
            "analysis=gradient_diversity: is not defined for FedMultiHead",
        ),
    ],
)
def test_analysis_that_a_run_cannot_have_is_rejected(analysis, simulation, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        analysis.check_run(make_simulation(**simulation))


# --- CKA


def hsic(one, other):
    """tr(K H L H) for linear kernels with the centring matrix H: Kornblith et al., Eq. 3, without
    its factor, which cancels in Eq. 4."""
    centre = np.eye(len(one)) - 1 / len(one)
    return np.trace(one @ one.T @ centre @ other @ other.T @ centre)


def test_cka_equals_the_formula_with_kernels_in_numpy():
    one, other = random(20, 3) + 5, random(20, 7, seed=1)
    other[:, 0] += 2 * one[:, 1]
    x, y = one.numpy(), other.numpy()
    expected = hsic(x, y) / np.sqrt(hsic(x, x) * hsic(y, y))
    assert 0.1 < expected < 0.9
    assert linear_cka(one, other) == pytest.approx(expected, rel=1e-12)
    assert math.isnan(linear_cka(one, torch.ones(20, 2)))


def test_cka_compares_the_models_before_and_after_a_round():
    """Each model uses its running statistics."""
    simulation = make_simulation(model=Normed())
    state, runtime = simulation.initial_state(), simulation.runtime
    state.advance(play_round(simulation, state))
    result, rows = measure(simulation, CKA(**EVERY), state=state)
    x, found = runtime.load_test(torch.arange(len(runtime.data.y_test)))[0], []
    for server in (state.server, result.server):
        runtime.net.set_buffers(server["buffers"])
        found.append(runtime.net(server["params"], x).features)
    assert rows == [{"round": 2, "cka": pytest.approx(linear_cka(*found), rel=1e-9)}]
    assert 0 < linear_cka(*found) < 1 - 1e-6


def test_cka_rejects_a_model_without_features():
    simulation = make_simulation()
    simulation.runtime.net.module = LogitsOnly(torch.nn.Sequential(torch.nn.Linear(36, 4)))
    with pytest.raises(ConfigError, match=r"analysis=cka: needs the model's features.* layers: 0"):
        CKA(**EVERY).check_run(simulation)


# --- local epochs


def test_local_models_are_tested_after_each_epoch():
    """Epoch 0 is the distributed model; the model after epoch 1 of 2 equals that of a run with one
    epoch; the last one is the local model, whose predictions are counted again. Batch norm: each
    model has separate running statistics."""
    settings = {"model": Normed(), "forgetting_metric": RoundDrop(local=True), "augment": False}
    simulation = make_simulation(**settings)
    result, rows = measure(simulation, EPOCHS)
    short = make_simulation(local=replace(LOCAL, epochs=1), **settings)
    short = play_round(short, short.initial_state())
    tested = {(row["client"], row["epoch"]): row["test_accuracy"] for row in rows}
    own = {row["client"]: row["train_accuracy"] for row in rows}
    runtime, trained = simulation.runtime, result.exchanges[0].trained
    for i, client in enumerate(result.cohort.clients):
        if not result.cohort.schedules[i].steps:  # batch norm has no batch of two of its examples
            assert (client, 1) not in tested
            continue
        assert tested[client, 1] == short.tests["plain"].local[i].mean()
        assert tested[client, 2] == result.tests["plain"].local[i].mean()
        numbers = torch.from_numpy(simulation.stages[0].federation.parts[client])
        x, y = runtime.load_train(numbers, None)
        model = tree.row(trained.messages["params"], i) | tree.row(trained.buffers, i)
        assert own[client] == (runtime.net(model, x).logits.argmax(-1) == y).double().mean()
    assert len({tested[client, 0] for client in result.cohort.clients}) == 1
    assert {row["epoch"] for row in rows} == {0, 1, 2}
    _, ends = measure(simulation, replace(EPOCHS, between=False))
    assert ends == [row for row in rows if row["epoch"] != 1]


# --- in a run

OPTIONS = [*SMALL, "local.epochs=2", "num_clients=4", "alpha=1"]


def test_resumed_run_has_the_same_analysis_tables(here, capsys):
    """Rows after the checkpoint, left by a killed run, are cut off. Before anything is cut, a table
    that another program saved again is refused."""
    names = ("weight_divergence", "gradient_diversity", "local_epochs", "cka")
    # and the last round
    measured = [*OPTIONS, f"analysis=[{','.join(names)}]"]
    measured += [f"analysis.{name}.every=2" for name in names]
    assert main.main([*measured, "rounds=3", "hydra.run.dir=whole"]) == 0
    assert main.main([*measured, "rounds=2", "hydra.run.dir=part"]) == 0
    for name in files.ANALYSES:
        with (here / "part" / name).open("a") as table:
            table.write("2,0,total\n")
    last = here / "part" / f"{names[-1]}.csv"
    own = last.read_bytes()
    last.write_bytes(own.replace(b"\n", b"\r\n"))
    before = {path: path.read_bytes() for path in here.rglob("part/**/*") if path.is_file()}
    assert main.main(["resume=part", "rounds=3"]) == 2
    assert "part/cka.csv: is not as the run wrote it" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in before}
    last.write_bytes(own)
    assert main.main(["resume=part", "rounds=3"]) == 0
    whole = RunDirectory(here / "whole")
    assert papers(["figures", "whole"]) == 0
    assert {path.stem for path in (here / "whole" / "figures").iterdir()} == set(names)
    for name in files.ANALYSES:
        assert (here / "part" / name).read_bytes() == (here / "whole" / name).read_bytes()
        assert sorted(set(whole.read_table(name)["round"])) == [2, 3]
    config = composed(*measured)
    told = []
    for record in past_rounds(whole, {}):
        for each in build(config).analysis:
            callback = each.create()
            callback.run = whole
            callback.recall(record)
        told.append(record.analysed)
    assert [bool(values) for values in told] == [False, False, True, True]
    assert told[3]["gradient_diversity"] >= 1
    assert 0 < told[3]["cka"] < 1
    assert told[3]["epochs_train_accuracy_after"] > told[2]["epochs_train_accuracy_before"]


# --- pictures


def draw_of(tmp_path, name):
    """Return the panels of a table's figure; the run directory contains nothing else."""
    figure = draw_analysis(name, "title", RunDirectory(tmp_path).read_table(f"{name}.csv"))
    with styled():
        figure.canvas.draw()
    return figure.axes


EPOCH_COLUMNS = (
    "round,client,epoch,test_accuracy,in_local_accuracy,out_local_accuracy,train_accuracy"
)


def test_local_epochs_figure_shows_means_and_deviations(tmp_path):
    """Two clients: 0.2 and 0.6 before training, 0.8 and 1 after it; eight of 40 measured rounds are
    drawn."""
    rows = [
        (r, c, e, 0.5, a, a, "")
        for r in range(40)
        for c, e, a in ((3, 0, 0.2), (5, 0, 0.6), (3, 1, 0.8), (5, 1, 1))
    ]
    (tmp_path / "local_epochs.csv").write_text(
        "\n".join([EPOCH_COLUMNS, *(",".join(map(str, row)) for row in rows)]) + "\n"
    )
    inside, outside, own = draw_of(tmp_path, "local_epochs")[:3]
    assert len(inside.containers) == len(outside.containers) == 8
    line, _, (bars,) = inside.containers[0].lines
    np.testing.assert_allclose(line.get_xydata(), [[0, 0.4], [1, 0.9]])
    np.testing.assert_allclose(
        [segment[:, 1] for segment in bars.get_segments()], [[0.2, 0.6], [0.8, 1.0]]
    )
    assert not own.containers  # the training accuracy is undefined
    assert outside.get_ylabel() == "out-local accuracy"


def test_figures_of_a_run_without_analyses_are_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("rounds: 1\n")
    assert papers(["figures", str(tmp_path)]) == 2
    assert f"{tmp_path}: the run has no table of an analysis" in capsys.readouterr().err


# --- pictures of a sweep


def history_of_one_round():
    """One round of two clients with 3:1 and 1:1 examples of two classes; the global model changes
    from (0.5, 0.5) to (0.6, 0.2)."""
    history = Record(np.array([[3, 1], [2, 2]]))
    history.add(0, np.array([0.5, 0.5]))
    history.add(1, np.array([0.6, 0.2]))
    history.add_local(1, np.array([0, 1]), np.array([[1.0, 0.0], [0.4, 0.8]]))
    return history


def test_accuracies_before_and_after_a_round_match_values_worked_by_hand():
    """The joint distribution is (5/8, 3/8): after the round 0.6 * 5/8 + 0.2 * 3/8 = 0.45 in and
    0.35 out. The clients' in-local accuracies are 0.75 and 0.6, the out-local ones 0.25 and 0.6."""
    before, local, after = before_local_after(history_of_one_round())
    assert before.loc[1].to_dict() == pytest.approx({"in": 0.5, "out": 0.5}, rel=1e-12)
    assert local["in"].tolist() == pytest.approx([0.75, 0.6], rel=1e-12)
    assert local["out"].tolist() == pytest.approx([0.25, 0.6], rel=1e-12)
    assert after.loc[1].to_dict() == pytest.approx({"in": 0.45, "out": 0.35}, rel=1e-12)
