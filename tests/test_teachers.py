"""References are asked once for each example that comes again unchanged: engine/teachers.py."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedntd import FedNTD
from fedexp.algorithms.local_training import OPTIMIZERS
from fedexp.algorithms.moon import Moon
from fedexp.core.tree import Params
from fedexp.data.text import DropoutKeys
from fedexp.engine import sequential, teachers
from fedexp.engine.base import Shared
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.teachers import MODELS, Kept
from fedexp.models import Output
from test_algorithms import SHIPPED
from test_continual import EVERY
from toy_federation import (
    ENGINES,
    LOCAL,
    PAIR,
    NormedModule,
    assemble,
    assert_close,
    make_simulation,
    play,
)

NTD = FedNTD(beta=1.0, tau=2.0, lambda_=1.0, distance="kl", tau_squared=True, mse_reduction="sum")
MOON = Moon(mu=1.0, tau=0.5, projection=0)
THREE = replace(LOCAL, epochs=3)


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """The number of examples of each call of a reference."""
    found, call = [], FunctionalNetwork.__call__

    def counted(self, params, x, mask=None):
        if type(self) is FunctionalNetwork:
            found.append(len(x))
        return call(self, params, x, mask)

    monkeypatch.setattr(FunctionalNetwork, "__call__", counted)
    return found


def examples_asked(simulation, asked: list[int]) -> tuple[int, int]:
    """The number of examples on which references are asked in the training of a round, and those of
    one epoch."""
    state = play(simulation, 1)
    cohort = assemble(simulation, state, 2)
    asked.clear()
    simulation.engine.train(
        Shared(simulation.algorithm, simulation.runtime, state.server, 0.1), cohort, False
    )
    return sum(asked), sum(schedule.examples for schedule in cohort.schedules) // THREE.epochs


@pytest.mark.parametrize(("algorithm", "references"), [(NTD, 1), (MOON, 2), (FedAvg(), 0)])
def test_a_reference_is_asked_in_the_first_epoch_alone(algorithm, references, asked):
    found, examples = examples_asked(make_simulation(algorithm, THREE, augment=False), asked)
    assert found == references * examples


def test_of_augmented_images_every_epoch_is_asked(asked):
    found, examples = examples_asked(make_simulation(NTD, THREE), asked)
    assert found == 3 * examples


@pytest.mark.parametrize("algorithm", [NTD, MOON])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_models_are_those_without_it(algorithm, optimizer, monkeypatch):
    local = replace(THREE, optimizer=optimizer)
    found = play(make_simulation(algorithm, local, augment=False))
    monkeypatch.setattr(sequential, "outputs_to_keep", lambda *_: None)
    expected = play(make_simulation(algorithm, local, augment=False))
    assert_close(found.server["params"], expected.server["params"])


def test_random_numbers_for_dropout_do_not_change_what_a_reference_says(asked, monkeypatch):
    """A text has its key in another column in every epoch; a model in eval mode does not read
    it."""
    simulation = make_simulation(NTD, THREE)
    changes = []
    monkeypatch.setattr(sequential, "Kept", lambda *given: changes.append(given))
    data = type(
        "Scheduled",
        (),
        {"draws": torch.zeros(2, 4, 1), "index": torch.zeros(2, 4), "lengths": [4, 4]},
    )()
    for draws in (DropoutKeys(), simulation.runtime.augmentation):
        sequential.outputs_to_keep(replace(simulation.runtime, augmentation=draws), data)
    assert len(changes) == 1


def test_none_are_kept_where_a_layer_looks_across_the_batch():
    runtime = make_simulation(NTD, THREE, augment=False).runtime
    module = NormedModule(1, 4)
    module.norm = nn.BatchNorm2d(3, track_running_stats=False)
    data = type("Scheduled", (), {"draws": None, "index": torch.zeros(2, 4), "lengths": [4, 4]})()
    assert sequential.outputs_to_keep(runtime, data) is not None
    assert (
        sequential.outputs_to_keep(replace(runtime, net=FunctionalNetwork(module, "fp64")), data)
        is None
    )


@dataclass
class Doubled:
    """A reference that answers w x, and counts."""

    calls: int = 0
    maps: tuple[torch.Tensor, ...] = ()

    def __call__(self, params: Params, x: torch.Tensor) -> Output:
        self.calls += 1
        return Output(x, x * params["w"], self.maps)


# two epochs; the second row is one example and padding
INDEX = torch.tensor([[7, 3], [5, 5], [3, 7], [5, 5]])
EXAMPLES = 6  # without the padding
W = {"w": torch.tensor(2.0)}


def passes(
    kept: Kept, reference: Doubled, params: Params = W, steps: tuple[int, ...] = (0, 1, 2, 3)
):
    """The logits of two epochs, of inputs that are the examples' numbers."""
    logits = []
    for step in steps:
        length = [2, 1, 2, 1][step]
        x = INDEX[step, :length, None].double()
        kept.show(x, step)
        logits.append(kept.of(params, x, lambda x=x: reference(params, x)).logits)
    return logits


def test_answers_come_back_in_the_order_of_the_batch():
    reference = Doubled()
    found = passes(Kept(INDEX, EXAMPLES), reference)
    assert reference.calls == 2
    assert [each.flatten().tolist() for each in found] == [[14.0, 6.0], [10.0], [6.0, 14.0], [10.0]]


def test_a_reference_that_changes_is_asked_again():
    reference, kept, params = Doubled(), Kept(INDEX, EXAMPLES), {"w": torch.tensor(2.0)}
    passes(kept, reference, params)
    params["w"].mul_(10)
    found = passes(kept, reference, params)
    assert reference.calls == 4
    assert found[-1].item() == 100.0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_reference_that_an_optimizer_trains_is_asked_again(optimizer):
    """A second model beside the client's; torch's fused kernels do not tell that they have changed
    a tensor."""
    local = replace(LOCAL, optimizer=optimizer)
    reference, kept, params = (
        Doubled(),
        Kept(INDEX, EXAMPLES),
        {"w": torch.tensor(2.0, dtype=torch.float64)},
    )
    passes(kept, reference, params)
    memory = optimizers.memory_of(params, local)
    optimizers.step_in_place(params, {"w": torch.ones_like(params["w"])}, memory, 0.1, local, 0)
    found = passes(kept, reference, params)
    assert reference.calls == 4
    assert found[-1].item() == 5 * params["w"].item() != 10.0


def test_a_reference_whose_tensors_are_replaced_is_asked_again():
    """In one dict, whose former tensors must not give their place in memory to new ones: what is
    new is not known."""
    for _ in range(50):
        reference, kept, params = (
            Doubled(),
            Kept(INDEX, EXAMPLES),
            {"w": torch.full((), 1.0, dtype=torch.float64)},
        )
        for value in (1.0, 2.0, 3.0, 4.0):
            params["w"] = params["w"] * 0 + value
            assert passes(kept, reference, params, (0, 1))[1].item() == 5 * value


def test_the_same_tensors_under_other_names_are_another_reference():
    reference, kept, w, v = (
        Doubled(),
        Kept(INDEX, EXAMPLES),
        torch.tensor(2.0),
        torch.tensor(3.0),
    )
    assert passes(kept, reference, {"w": w, "v": v})[1].item() == 10.0
    assert passes(kept, reference, {"v": w, "w": v})[1].item() == 15.0


def test_inputs_that_need_a_gradient_or_have_changed_are_not_looked_up():
    reference, kept, x = Doubled(), Kept(INDEX, EXAMPLES), torch.ones(2, 1, dtype=torch.float64)
    kept.show(x, 0)
    kept.of(W, x, lambda: reference(W, x))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(kept.of(W, x, lambda: reference(W, x)).logits.sum(), x)
    assert gradient.tolist() == [[2.0], [2.0]]
    x = x.detach()
    kept.show(x, 0)
    assert kept.of(W, x, lambda: reference(W, x)).logits.tolist() == [[2.0], [2.0]]
    x.add_(1)
    assert kept.of(W, x, lambda: reference(W, x)).logits.tolist() == [[4.0], [4.0]]


def test_nothing_is_kept_where_no_example_comes_again():
    """Of a single epoch."""
    kept = Kept(INDEX[:2], 3)
    passes(kept, Doubled(), steps=(0, 1))
    assert [*kept._models.values()] == [None]


def test_too_much_room_is_never_asked_for():
    """Of a client with a million examples and features of a million numbers."""
    kept, x = (
        Kept(torch.arange(2_000_000).remainder(1_000_000)[:, None], 2_000_000),
        torch.ones(1, 1),
    )
    kept.show(x, 0)
    output = kept.of(W, x, lambda: Output(torch.zeros(()).expand(1, 1_000_000), x))
    assert output.features.shape == (1, 1_000_000)
    assert [*kept._models.values()] == [None]


# The vectorised engine asks references in every epoch.
STREAM_ROWS = {row.name: row for row in EVERY}
ASKING = {row.name: row for row in SHIPPED} | STREAM_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKING)
def test_engines_agree_on_images_that_are_not_augmented(name):
    """Of every algorithm, over three epochs; in a stream, in both tasks."""
    row, states = ASKING[name], []
    for engine in PAIR:
        settings = {"augment": False, "local": THREE}
        simulation = row.stream(**settings) if name in STREAM_ROWS else row.simulation(**settings)
        simulation = replace(simulation, engine=ENGINES[engine])
        states.append(play(simulation, 4 if name in STREAM_ROWS else 2).server)
    assert_close(*states)


def test_other_inputs_and_parameters_in_training_are_not_looked_up():
    reference, kept, x = Doubled(), Kept(INDEX, EXAMPLES), torch.ones(2, 1)
    kept.show(x, 0)
    kept.of(W, x, lambda: reference(W, x))
    kept.of(W, x, lambda: reference(W, x))
    assert reference.calls == 1
    kept.of(W, x.clone(), lambda: reference(W, x))
    moving = {"w": W["w"].clone().requires_grad_()}
    for calls in (3, 4):
        assert kept.of(moving, x, lambda: reference(moving, x)).logits.requires_grad
        assert reference.calls == calls
    torch.func.grad(lambda w: kept.of(W, x, lambda: reference({"w": w}, x)).logits.sum())(
        torch.tensor(1.0)
    )
    assert reference.calls == 5


def test_memory_has_a_limit(monkeypatch):
    reference, kept = Doubled(), Kept(INDEX, EXAMPLES)
    models = [{"w": torch.tensor(float(i))} for i in range(MODELS + 1)]
    for params in models:
        passes(kept, reference, params)
    assert reference.calls == 2 * MODELS + 4
    # three examples, a feature and a logit of eight bytes each
    monkeypatch.setattr(teachers, "BYTES", 3 * 8 * 2 - 1)
    reference = Doubled()
    passes(Kept(INDEX, EXAMPLES), reference)
    assert reference.calls == 4


def test_maps_are_not_kept():
    reference = Doubled(maps=(torch.zeros(1),))
    passes(Kept(INDEX, EXAMPLES), reference)
    assert reference.calls == 4


def test_a_model_without_features_has_none_either():
    kept, x = Kept(INDEX, EXAMPLES), torch.ones(2, 1)
    kept.show(x, 0)
    outputs = [kept.of(W, x, lambda: Output(None, x)) for _ in range(2)]
    assert [output.features for output in outputs] == [None, None]
    assert np.array_equal(outputs[1].logits, x)
