"""Runs import neither optuna nor torch's compiler (core/private/torch_internals.py)."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8),
    reason="gradients of torch 2.6 always load the compiler",
)

GRADIENT = """
import sys, torch
import fedexp.cli.job, fedexp.training.run
from fedexp.core.private.torch_internals import without_compiler
def gradient():
    return torch.func.grad(lambda x: (x**3).sum())(torch.ones(2)).tolist()
without_compiler()
assert gradient() == [3, 3]
assert not {"optuna", "torch._dynamo"} & sys.modules.keys()
"""

LOADED = """
stand_in = torch._dynamo
torch._dynamo.reset()
assert torch._dynamo is sys.modules["torch._dynamo"] is not stand_in
assert torch._dynamo.compiled_autograd is sys.modules["torch._dynamo.compiled_autograd"]
without_compiler()
assert torch._dynamo is sys.modules["torch._dynamo"]
assert gradient() == [3, 3]
assert torch.compile(torch.sin, backend="eager")(torch.zeros(1)).tolist() == [0]
"""


def test_runs_import_neither_optuna_nor_the_compiler():
    """optuna is an optional dependency."""
    subprocess.run([sys.executable, "-c", GRADIENT], check=True)


@pytest.mark.slow
def test_the_compiler_loads_when_used():
    subprocess.run([sys.executable, "-c", GRADIENT + LOADED], check=True)
