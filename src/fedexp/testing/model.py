"""Check a model."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedexp.core import tree
from fedexp.core.rng import seeded
from fedexp.engine.batch_norm import has_batch_norm, uses_batch_statistics
from fedexp.engine.vectorised.support import find_obstacle
from fedexp.models import Model
from fedexp.testing.federation import (
    assert_engines_agree,
    assert_equal,
    configure,
    require,
    simulate,
)
from fedexp.training.rounds import play_round

BATCH = 7
TOLERANCE = 1e-9  # in float64


def check_model(model: Model, overrides: Sequence[str] = ()) -> None:
    """Check a model on a few digits, or on another data set, in float64.

    The checks are:

    - The logits are [B, C] and the features [B, D], also for one example. In eval mode, the outputs
      for an example do not depend on its batch, unless by batch norm without running statistics, or
      on random numbers, and nothing changes.
    - Two networks of one seed are equal. All tensors are parameters or buffers, and a network that
      loads the `state_dict` of another one computes the same.
    - A model with batch norm declares `mixes_examples`.
    - The logits depend on trainable parameters, which stay finite in two rounds of FedAvg. A
      warning names those without effect. If the model `vectorises`, or a trial finds no obstacle,
      the vectorised engine trains it as the sequential one does, within 1e-12.

    overrides: such as ["dataset=cifar10"].
    """
    name = type(model).__name__
    # no test set is used, since that of another data set may be large
    simulation = simulate(configure([*overrides, "eval_interval=3"]), 3, model=model)
    data = simulation.runtime.data

    def build(seed: int) -> nn.Module:
        with seeded(seed):
            return model.build(data.shape, data.num_classes).double()

    network = build(0)
    assert_equal(
        build(0).state_dict(),
        network.state_dict(),
        what=f"{name}: two networks of one seed differ; draw initial values only with torch",
    )
    index = torch.arange(min(BATCH, len(data.y_train)))
    x = data.inputs(data.x_train, index, None, None, torch.float64)
    check_outputs(name, network.eval(), x, data.num_classes)
    mixes = has_batch_norm(network)
    require(
        model.mixes_examples or not mixes,
        f"{name}: has batch norm, so mixes_examples must be True; else batches of one example fail",
    )
    with seeded(0):
        logits = network.train()(x).logits
    require(logits.requires_grad, f"{name}: the logits do not depend on trainable parameters")
    trained = {key: leaf for key, leaf in network.named_parameters() if leaf.requires_grad}
    found = torch.autograd.grad(logits.sum(), list(trained.values()), allow_unused=True)
    if unused := [key for key, grad in zip(trained, found, strict=True) if grad is None]:
        warnings.warn(f"{name}: the logits do not depend on {', '.join(unused)}", stacklevel=2)
    check_state(name, network.eval(), build(1).eval(), x)
    state, engines = simulation.initial_state(), ["sequential"]
    obstacle = "it has vectorises = False"
    if model.vectorises is None:
        obstacle = find_obstacle(build(0), x) or ""
    if model.vectorises or not obstacle:
        engines.append("vectorised")
    for _ in range(2):
        result = play_round(simulation, state)
        finite = tree.is_finite(result.server["params"])
        require(finite, f"{name}: a round of training gives nan or infinity")
        try:
            assert_engines_agree(simulation, state, engines, evaluate_local=False)
        except AssertionError as error:
            advice = "if its layers mix examples or draw random numbers, set vectorises = False"
            raise AssertionError(f"{name}: {error}\n{advice}") from error
        state.advance(result)


@torch.no_grad()
def check_outputs(name: str, network: nn.Module, x: Tensor, classes: int) -> None:
    """Check the outputs of a network in eval mode for inputs x [B, ...]."""
    before = {key: value.clone() for key, value in network.state_dict().items()}
    whole = outputs(network, x)
    logits = whole["logits"]
    require(
        not (logits.ge(0).all() and logits.sum(1).sub(1).abs().lt(TOLERANCE).all()),
        f"{name}: the logits of each example are positive and sum to 1; return the outputs before"
        " softmax, which the loss applies",
    )
    # layers that normalise by batch statistics even now, such as those of model=resnet10
    sizes = (len(x),) if uses_batch_statistics(network) else (len(x), 1, 2)
    for size in sizes:
        given = outputs(network, x[:size])
        for key, value in given.items():
            shape = [size, classes if key == "logits" else whole[key].shape[-1]]
            require(
                [*value.shape] == shape,
                f"{name}: the {key} of {size} of {len(x)} examples have shape {[*value.shape]};"
                f" must be {shape}",
            )
            cause = "on random numbers" if size == len(x) else "on the other examples of its batch"
            torch.testing.assert_close(
                value,
                whole[key][:size],
                rtol=TOLERANCE,
                atol=TOLERANCE,
                msg=lambda text, key=key, cause=cause: (  # type: ignore[misc]
                    f"{name}: in eval mode, the {key} of an example depend {cause}: {text}"
                ),
            )
    what = f"{name}: the network changes its parameters or buffers in eval mode"
    assert_equal(network.state_dict(), before, what=what)


@torch.no_grad()
def check_state(name: str, trained: nn.Module, other: nn.Module, x: Tensor) -> None:
    """Check that the state_dict of a trained network has all that its outputs depend on."""
    hidden = [
        f"{place}.{key}".lstrip(".")
        for place, module in trained.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    require(
        not hidden,
        f"{name}: {', '.join(hidden)} is a tensor, but neither a parameter nor a buffer, so it is"
        " neither sent nor moved to the GPU; use nn.Parameter or register_buffer",
    )
    other.load_state_dict(trained.state_dict())
    what = f"{name}: a network that loads the state_dict of a trained one computes otherwise"
    assert_equal(outputs(other, x), outputs(trained, x), what=what)


def outputs(network: nn.Module, x: Tensor) -> dict[str, Any]:
    """Return the logits and, if they are known, the features of a network."""
    output = network(x)
    known = {"logits": output.logits, "features": output.features}
    return {key: value for key, value in known.items() if value is not None}
