"""The divergence of softened predictions as one kernel, against its definition in float64."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.func import grad, vmap

from fedexp.algorithms import divergence as module
from fedexp.algorithms.divergence import _Divergence, kl_divergence


def draw(classes, device="cpu"):
    """Stacked logits of a teacher and a student [S, B, C], some far apart, labels, and weights of
    the examples."""
    generator = torch.Generator().manual_seed(classes)
    teacher, student = (10 * torch.randn(3, 7, classes, generator=generator) for _ in range(2))
    teacher[0, 0, 0], student[0, 1, 1] = 500, 500
    labels, weights = (
        torch.randint(classes, (3, 7), generator=generator),
        torch.rand(3, 7, generator=generator),
    )
    return [each.to(device) for each in (teacher, student, labels, weights)]


def value_and_gradient(function, classes, masked, teacher, student, labels, weights):
    """Of the divergence from the teacher of each client, and from a teacher that all share."""

    def loss(student, teacher, labels, weights):
        keep = torch.arange(classes, device=labels.device) != labels[:, None] if masked else None
        values = function(teacher, student, 3.0, keep)
        return (values * weights.to(values)).sum(), values

    each = grad(loss, has_aux=True)
    shared = vmap(each, in_dims=(0, None, 0, 0))(student, teacher[0], labels, weights)
    return (
        vmap(each)(student, teacher, labels, weights),
        shared,
        each(student[0], teacher[0], labels[0], weights[0]),
    )


def compare(function, device="cpu"):
    for classes in (2, 10, 100):
        for masked in (False, True):
            teacher, student, *rest = draw(classes, device)
            ours = value_and_gradient(function, classes, masked, teacher, student, *rest)
            exact = value_and_gradient(
                kl_divergence, classes, masked, teacher.double(), student.double(), *rest
            )
            torch.testing.assert_close(ours, exact, rtol=2e-5, atol=2e-6, check_dtype=False)


def interpret():
    linspace = torch.linspace
    torch.linspace = lambda *size, device: linspace(*size)  # the first use, on a CPU
    assert module.kernels() is not None
    compare(lambda teacher, student, tau, keep: _Divergence.apply(teacher, student, keep, tau)[0])


@pytest.mark.slow
def test_kernel_interpreted():
    """Triton's interpreter runs the kernel on a CPU; it must be told before triton is imported."""
    pytest.importorskip("triton")
    code = "import test_divergence as t; t.interpret()"
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.gpu
def test_gpu_kernel(caplog):
    module.kernels.cache_clear()
    assert module.kernels() is not None, caplog.messages
    compare(kl_divergence, "cuda")


def test_a_kernel_with_other_numbers_is_not_used(monkeypatch, caplog):
    kernels = pytest.importorskip("fedexp.algorithms.divergence_kernels")
    linspace = torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *size, device: linspace(*size))
    for of_value, of_slope in ((1.0, 1.0), (1.01, 1.0), (1.0, 1.01)):

        def divergence(teacher, student, keep, tau, of_value=of_value, of_slope=of_slope):
            leaf = student.clone().requires_grad_()  # torch.func is switched off here
            value = module._defined(teacher, leaf, tau, keep)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
            return of_value * value.detach(), of_slope * slope

        monkeypatch.setattr(kernels, "divergence", divergence)
        module.kernels.cache_clear()
        assert (module.kernels() is None) == (of_value * of_slope != 1)
    (message,) = {text.partition("(")[0] for text in caplog.messages}
    assert len(caplog.messages) == 2
    assert message == "the distillation loss without kernels of its own: Triton does not work here "
    module.kernels.cache_clear()


def test_no_gradient_goes_to_the_teacher():
    teacher, student, _, _ = draw(10)
    slope = grad(lambda t: kl_divergence(t, student[0], 1.0, None).sum())(teacher[0])
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=0)


def test_kernel_has_no_second_gradient(monkeypatch):
    """It is refused, not wrong."""
    monkeypatch.setattr(
        _Divergence, "forward", staticmethod(lambda t, s, keep, tau: ((s - t).sum(-1), s - t))
    )
    teacher, student, _, _ = draw(10)
    value = partial(_Divergence.apply, teacher[0])

    def norm(student):
        return grad(lambda s: value(s, None, 1.0)[0].sum())(student).square().sum()

    assert norm(student[0]) > 0
    with pytest.raises(NotImplementedError, match="gradient of a gradient"):
        grad(norm)(student[0])
