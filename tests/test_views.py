"""Test views: the augmented view equals an obvious loop and does not change other results."""

import csv

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.core.errors import ConfigError
from fedexp.core.rng import generator_for
from fedexp.core.storage import write_json
from fedexp.data.held_out import Validation
from fedexp.data.resized_crop import ResizedCrop
from fedexp.data.views import TEST_VIEWS, require_list
from fedexp.engine.base import Shared
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.rundir import files
from fedexp.rundir.reader import RunDirectory
from fedexp.testing import record
from fedexp.training.summary import summary_of
from toy_federation import AUGMENTATION, ENGINES, NOISE, Noise, assemble, make_simulation, play

BOTH = ["plain", "augmented"]


def shown(image: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Return an image [6, 6, 1] as float64 [1, 6, 6] after crop with zero padding 1, flip,
    normalisation and a hole of side 2 (AUGMENTATION), pixel by pixel."""
    dy, dx, flip, cy, cx = draw[:5]
    padded = np.zeros((8, 8))
    padded[1:7, 1:7] = image[..., 0] / 255
    crop = padded[dy : dy + 6, dx : dx + 6]
    if flip:
        crop = crop[:, ::-1]
    normal = (crop - 0.4) / 0.3
    for row in range(6):
        for col in range(6):
            if cy - 1 <= row < cy + 1 and cx - 1 <= col < cx + 1:
                normal[row, col] = 0.0
    return normal[None]


def seen(simulation, view, round):
    """Yield (image [1, 6, 6], label) of each example of a view, computed pixel by pixel."""
    data = simulation.runtime.data
    if view == "validation":
        for number in data.validation.tolist():
            pixels = data.x_train[number].permute(2, 0, 1).double() / 255
            yield (pixels - 0.4) / 0.3, data.y_train[number]
        return
    rng = generator_for(simulation.seeds.training, "augmented test", round)
    draws = AUGMENTATION.draw(rng, len(data.y_test), 6, 6)
    for image, label, draw in zip(data.x_test.numpy(), data.y_test, draws, strict=True):
        yield torch.from_numpy(shown(image, draw)), label


def slow_test(simulation, view, model, round):
    """Return (correct predictions per class [C], mean loss) of a model, one image at a time."""
    correct, losses = [0] * simulation.runtime.data.num_classes, []
    for image, label in seen(simulation, view, round):
        logits = simulation.runtime.net(model, image[None]).logits.detach()
        correct[label] += int(logits.argmax()) == label
        losses.append(F.cross_entropy(logits, label[None]).item())
    return correct, np.mean(losses)


# Ranks take seconds to start. test_ranks.py compares their results in `make test`.
every_engine = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, marks=pytest.mark.slow if name == "workers" else ())
        for name, engine in ENGINES.items()
    ],
    ids=ENGINES,
)


@every_engine
def test_views_equal_a_test_of_one_image_at_a_time(engine):
    """The augmented view has other random numbers in each round, also for local models."""
    held_out = Validation(fraction=0.25, per_client=False)
    simulation = make_simulation(
        sizes=(1, 3, 7, 9, 8), test_views=BOTH, evaluate_on="both", validation=held_out
    )
    state, others = play(simulation, 2), ("augmented", "validation")
    server = {name: state.server[name] for name in ("params", "buffers")}
    for view in others:
        for round in (2, 3):
            correct, loss = slow_test(simulation, view, state.server["params"], round)
            found = engine.evaluate(simulation.runtime, server, view, round)
            assert found.class_correct.tolist() == correct
            assert float(found.loss) == pytest.approx(loss, abs=1e-12)
    shared = Shared(simulation.algorithm, simulation.runtime, state.server, 0.1)
    trained = engine.train(shared, assemble(simulation, state, 3), True)
    assert list(trained.class_correct) == [*BOTH, "validation"]
    for i in range(4):
        local = {name: value[i] for name, value in trained.messages["params"].items()}
        expected = [simulation.runtime.evaluate(local).class_correct.tolist()]
        expected += [slow_test(simulation, view, local, 3)[0] for view in others]
        assert [value[i].tolist() for value in trained.class_correct.values()] == expected


def full_run(simulation, directory, resume=False):
    """Run to the end. Return the rows of rounds.csv without times, and the summary."""
    state = record(simulation, directory, resume)
    summary = summary_of(simulation, state)
    write_json(directory / files.SUMMARY, summary)
    return rows_of(directory / files.ROUNDS), summary


def rows_of(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {k: v for k, v in row.items() if not k.endswith("second") and not k.endswith("seconds")}
        for row in rows
    ]


def measured(summary):
    return {name: value for name, value in summary.items() if "second" not in name}


def with_local(**changes):
    given = {"forgetting_metric": RoundDrop(local=True), "rounds": 4}
    return make_simulation(**given | changes)


def test_further_tests_do_not_change_plain_results(tmp_path):
    one, one_summary = full_run(with_local(), tmp_path / "one")
    further = {"test_views": BOTH, "evaluate": ["global", "personal"]}
    two, two_summary = full_run(with_local(**further), tmp_path / "two")
    assert [{name: row[name] for name in one[0]} for row in two] == one
    assert {f"{name}_augmented" for name in one[0] if "test_" in name} < {*two[0]} - {*one[0]}
    assert {"personal_accuracy", "personal_local_forgetting_worst_augmented"} < {*two[0]}
    for name in ("class_accuracy.csv", "local_class_accuracy.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert measured(one_summary).items() <= measured(two_summary).items()
    assert not list((tmp_path / "one").glob("*augmented*"))


def test_augmented_view_has_separate_history(tmp_path):
    """Its metrics follow from its class accuracies."""
    simulation = with_local(test_views=BOTH)
    rows, summary = full_run(simulation, tmp_path)
    simulation.stages[0].partition.save(tmp_path / files.PARTITION, simulation.runtime.data.classes)
    history = RunDirectory(tmp_path).record("augmented")
    assert list(history.rounds) == [0, 1, 2, 3, 4]
    for after, row in zip(history.class_accuracy, rows, strict=True):
        # 5 test images a class
        assert float(row["test_accuracy_augmented"]) == pytest.approx(after.mean(), abs=1e-12)
    matrix = np.array(history.class_accuracy[1:])
    forgetting = np.mean([max(column[:-1]) - column[-1] for column in matrix.T])
    assert summary["forgetting_augmented"] == pytest.approx(forgetting, abs=1e-12)
    assert summary["accuracy_augmented"] == float(rows[-1]["test_accuracy_augmented"])
    assert summary["best_accuracy_augmented"] == max(
        float(row["test_accuracy_augmented"]) for row in rows[1:]
    )
    assert len(history.local_class_accuracy) == 4


@pytest.mark.parametrize(
    ("views", "words"),
    [
        (
            ["plain", "augmentd"],
            ["test_views=augmentd", "plain, augmented", "nearest: 'augmented'"],
        ),
        (["augmented"], ["test_views=[augmented]", "starts with plain"]),
        (["plain", "plain"], ["test_views=[plain,plain]", "no repetitions"]),
    ],
)
def test_invalid_views_are_rejected(views, words):
    with pytest.raises(ConfigError) as error:
        require_list("test_views", views, TEST_VIEWS)
    assert all(word in str(error.value) for word in words), error.value


def test_augmented_view_needs_augmentation():
    with pytest.raises(ConfigError, match=r"test_views=\[plain,augmented\].*augment=false"):
        make_simulation(test_views=BOTH, augment=False)


class LargerTest(Noise):
    """Test images with twice the height of the training images; both are cropped to 4 x 4."""

    def read(self):
        found = super().read()
        return found | {"x_test": np.repeat(found["x_test"], 2, axis=1)}


@pytest.mark.parametrize("view", ["plain", "augmented"])
def test_test_images_of_another_size_are_cropped_in_their_own_size(view):
    crop = ResizedCrop(
        size=4,
        base=None,
        scale=(0.5, 1.0),
        ratio=(0.5, 2.0),
        flip=False,
        test_size=4,
        interpolation="bilinear",
    )
    dataset = LargerTest(**NOISE | {"augmentation": crop})
    simulation = make_simulation(dataset=dataset, test_views=["plain", "augmented"])
    runtime = simulation.runtime
    draws = runtime.test_draws(view, 1)
    server = simulation.initial_state().server
    assert simulation.engine.evaluate(runtime, server, view, 1).examples == 20
    if view == "augmented":
        bottom, right = (draws[:, :2] + draws[:, 2:4]).amax(0).tolist()
        assert 6 < bottom <= 12, "the training images have 6 x 6 pixels"
        assert right <= 6
