"""The cache of reference models' outputs (engine/teachers.py), in runs and alone."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.local_training import OPTIMIZERS
from fedexp.algorithms.moon import Moon
from fedexp.core.tree import Params
from fedexp.data.text import DropoutKeys
from fedexp.engine import sequential, teachers
from fedexp.engine.base import Shared
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.teachers import MODELS, OutputCache
from fedexp.models import Output
from test_algorithms import SHIPPED
from test_continual import EVERY
from toy_federation import (
    ENGINES,
    LOCAL,
    NTD,
    PAIR,
    NormedModule,
    assemble,
    assert_close,
    make_simulation,
    play,
)

MOON = Moon(mu=1.0, tau=0.5, projection=0)
THREE = replace(LOCAL, epochs=3)


# --- in runs


@pytest.mark.parametrize(
    ("algorithm", "augment", "passes"),
    [(NTD, False, 1), (MOON, False, 2), (FedAvg(), False, 0), (NTD, True, 3)],
)
def test_teachers_run_only_in_the_first_epoch_without_augmentation(
    algorithm, augment, passes, monkeypatch
):
    """Moon has two references; there are three epochs."""
    computed, call = [], FunctionalNetwork.__call__

    def counted(self, params, x, mask=None):
        if type(self) is FunctionalNetwork:
            computed.append(len(x))
        return call(self, params, x, mask)

    simulation = make_simulation(algorithm, THREE, augment=augment)
    state = play(simulation, 1)
    cohort = assemble(simulation, state, 2)
    monkeypatch.setattr(FunctionalNetwork, "__call__", counted)
    shared = Shared(algorithm, simulation.runtime, state.server, 0.1)
    simulation.engine.train(shared, cohort, False)
    examples = sum(schedule.examples for schedule in cohort.schedules) // THREE.epochs
    assert sum(computed) == passes * examples


@pytest.mark.parametrize("algorithm", [NTD, MOON])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_caching_teacher_outputs_does_not_change_the_models(algorithm, optimizer, monkeypatch):
    local = replace(THREE, optimizer=optimizer)
    found = play(make_simulation(algorithm, local, augment=False))
    monkeypatch.setattr(sequential, "make_cache", lambda *_: None)
    expected = play(make_simulation(algorithm, local, augment=False))
    assert_close(found.server["params"], expected.server["params"])


def test_changing_inputs_or_batch_statistics_prevent_caching():
    """Random numbers for dropout do not: a model in eval mode does not read them."""
    runtime = make_simulation(NTD, THREE).runtime
    module = NormedModule(1, 4)
    module.norm = nn.BatchNorm2d(3, track_running_stats=False)
    normed = FunctionalNetwork(module, "fp64")
    draws = torch.zeros(2, 4, 1)

    def caches(draws, **changes):
        data = SimpleNamespace(draws=draws, index=torch.zeros(2, 4), lengths=[4, 4])
        return sequential.make_cache(replace(runtime, **changes), data) is not None

    assert not caches(draws)
    assert caches(draws, augmentation=DropoutKeys())
    assert caches(None)
    assert not caches(None, net=normed)


# The vectorised engine has no cache.
WITH_REFERENCES = {row.name: row for row in (*SHIPPED, *EVERY)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_REFERENCES)
def test_engines_agree_on_images_that_are_not_augmented(name):
    """For every algorithm, over three epochs; in a stream, in both tasks."""
    row, states = WITH_REFERENCES[name], []
    for engine in PAIR:
        settings = {"augment": False, "local": THREE}
        simulation = replace(row.simulation(**settings), engine=ENGINES[engine])
        states.append(play(simulation, row.rounds).server)
    assert_close(*states)


# --- alone

# two epochs; the second row is one example and padding
INDEX = torch.tensor([[7, 3], [5, 5], [3, 7], [5, 5]])
EXAMPLES = 6  # without the padding
W = {"w": torch.tensor(2.0)}


@dataclass
class Reference:
    """A model w x with a cache, which counts its forward passes."""

    cache: OutputCache = field(default_factory=lambda: OutputCache(INDEX, EXAMPLES))
    calls: int = 0
    maps: tuple[torch.Tensor, ...] = ()

    def __call__(self, x: torch.Tensor, params: Params = W) -> torch.Tensor:
        def compute() -> Output:
            self.calls += 1
            return Output(x, x * params["w"], self.maps)

        return self.cache.output(params, x, compute).logits

    def epochs(self, params: Params = W, steps: tuple[int, ...] = (0, 1, 2, 3)):
        """The logits of two epochs, for inputs that are the examples' indices."""
        logits = []
        for step in steps:
            x = INDEX[step, : [2, 1, 2, 1][step], None].double()
            self.cache.set_batch(x, step)
            logits.append(self(x, params))
        return logits


def test_cached_outputs_are_in_the_order_of_the_batch():
    reference = Reference()
    found = reference.epochs()
    assert reference.calls == 2
    assert [each.flatten().tolist() for each in found] == [[14.0, 6.0], [10.0], [6.0, 14.0], [10.0]]


def test_teacher_that_changes_in_place_runs_again():
    reference, params = Reference(), {"w": torch.tensor(2.0)}
    reference.epochs(params)
    params["w"].mul_(10)
    assert reference.epochs(params)[-1].item() == 100.0
    assert reference.calls == 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_teacher_that_an_optimizer_changes_runs_again(optimizer):
    """torch's fused kernels do not count a tensor's changes."""
    local, reference = replace(LOCAL, optimizer=optimizer), Reference()
    params = {"w": torch.tensor(2.0, dtype=torch.float64)}
    reference.epochs(params)
    memory = optimizers.memory_of(params, local)
    optimizers.step_in_place(params, {"w": torch.ones_like(params["w"])}, memory, 0.1, local, 0)
    assert reference.epochs(params)[-1].item() == 5 * params["w"].item() != 10.0
    assert reference.calls == 4


def test_teacher_whose_tensors_are_replaced_runs_again():
    """A new tensor may have the id of a deleted one, so the cache must keep the old tensors."""
    for _ in range(50):
        reference, params = Reference(), {"w": torch.full((), 1.0, dtype=torch.float64)}
        for value in (1.0, 2.0, 3.0, 4.0):
            params["w"] = params["w"] * 0 + value
            assert reference.epochs(params, (0, 1))[1].item() == 5 * value


def test_teacher_with_other_parameter_names_is_not_served_from_the_cache():
    reference, w, v = Reference(), torch.tensor(2.0), torch.tensor(3.0)
    assert reference.epochs({"w": w, "v": v})[1].item() == 10.0
    assert reference.epochs({"v": w, "w": v})[1].item() == 15.0


def test_teacher_runs_again_if_its_input_has_changed_or_needs_a_gradient():
    reference, x = Reference(), torch.ones(2, 1, dtype=torch.float64)
    reference.cache.set_batch(x, 0)
    reference(x)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(reference(x).sum(), x)
    assert gradient.tolist() == [[2.0], [2.0]]
    x = x.detach()
    reference.cache.set_batch(x, 0)
    assert reference(x).tolist() == [[2.0], [2.0]]
    x.add_(1)
    assert reference(x).tolist() == [[4.0], [4.0]]


def test_outputs_for_other_inputs_or_trained_parameters_are_not_cached():
    reference, x = Reference(), torch.ones(2, 1)
    reference.cache.set_batch(x, 0)
    reference(x)
    reference(x)
    assert reference.calls == 1
    reference(x.clone())
    moving = {"w": W["w"].clone().requires_grad_()}
    for calls in (3, 4):
        assert reference(x, moving).requires_grad
        assert reference.calls == calls
    torch.func.grad(lambda w: reference(x, {"w": w}).sum())(torch.tensor(1.0))
    assert reference.calls == 5


def test_outputs_are_not_cached_for_a_single_epoch():
    reference = Reference(OutputCache(INDEX[:2], 3))
    reference.epochs(steps=(0, 1))
    assert [*reference.cache._models.values()] == [None]


def test_outputs_above_the_limit_of_memory_are_not_cached(monkeypatch):
    """A million examples with a million features each would need 4 TB."""
    index = torch.arange(2_000_000).remainder(1_000_000)[:, None]
    cache, x = OutputCache(index, 2_000_000), torch.ones(1, 1)
    cache.set_batch(x, 0)
    output = cache.output(W, x, lambda: Output(torch.zeros(()).expand(1, 1_000_000), x))
    assert output.features.shape == (1, 1_000_000)
    assert [*cache._models.values()] == [None]
    # three examples, a feature and a logit of eight bytes each
    monkeypatch.setattr(teachers, "BYTES", 3 * 8 * 2 - 1)
    reference = Reference()
    reference.epochs()
    assert reference.calls == 4


def test_only_the_first_teachers_of_a_round_have_cached_outputs():
    reference = Reference()
    for i in range(MODELS + 1):
        reference.epochs({"w": torch.tensor(float(i))})
    assert reference.calls == 2 * MODELS + 4


def test_feature_maps_are_not_cached():
    reference = Reference(maps=(torch.zeros(1),))
    reference.epochs()
    assert reference.calls == 4


def test_a_model_without_features_is_cached_without_features():
    cache, x = OutputCache(INDEX, EXAMPLES), torch.ones(2, 1)
    cache.set_batch(x, 0)
    outputs = [cache.output(W, x, lambda: Output(None, x)) for _ in range(2)]
    assert [output.features for output in outputs] == [None, None]
    assert np.array_equal(outputs[1].logits, x)
