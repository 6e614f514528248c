"""Compute the largest eigenvalues of the Hessian of the mean loss.

The method is Lanczos iteration with Hessian-vector products.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vjp

from fedexp.core.errors import ConfigError
from fedexp.core.rng import generator_for
from fedexp.core.tree import Params
from fedexp_papers.posthoc.base import Subject
from fedexp_papers.posthoc.vectors import flatten, unflatten

BATCH = 250  # examples per batch; a product keeps the whole graph of the gradient in memory

Product = Callable[[Tensor], Tensor]  # v [P] -> H v [P]


# the k algebraically largest eigenvalues of a matrix in descending order, float64 [k], the
# eigenvectors of unit length, float64 [P, k], and the residuals ||H v - lambda v||, float64 [k]
Spectrum = tuple[np.ndarray, np.ndarray, np.ndarray]


def loss_hessian(subject: Subject, params: Params) -> Product:
    """Return the function v -> H v, where H is the Hessian of the loss.

    The loss is the mean cross-entropy over the subject's examples, in eval mode. H v is the
    gradient of the dot product of the loss's gradient and v, computed by applying reverse mode
    twice (Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 1994).
    """
    runtime, count = subject.runtime, len(subject.labels)

    def loss(params: Params, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        logits = runtime.class_logits(runtime.net(params, x).logits, index)
        return F.cross_entropy(logits, y, reduction="sum") / count

    def product(vector: Tensor) -> Tensor:
        direction, total = unflatten(vector, params), torch.zeros_like(vector)
        for index in torch.arange(count, device=runtime.device).split(BATCH):
            x, y = runtime.load_test(index)  # not in `loss`: it caches constants
            pull = vjp(grad(partial(loss, x=x, y=y, index=index)), params)[1]
            total += flatten(pull(direction)[0]).detach()
        return total

    return product


def largest_eigenvalues(
    subject: Subject, count: int, seed: int = 0, tolerance: float = 1e-3
) -> Spectrum:
    """Return the `count` largest eigenvalues of the Hessian for the subject's model.

    The method is implicitly restarted Lanczos iteration (ARPACK, in float64), which only needs
    products of the Hessian with vectors. tolerance: the relative tolerance for each eigenvalue.
    Raises ConfigError if the iteration does not converge, or if `count` is not less than the number
    of parameters.
    """
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    params = subject.load(subject.model)
    product, like = loss_hessian(subject, params), flatten(params)
    size = len(like)
    if not 0 < count < size:
        raise ConfigError(
            f"--eigenvalues {count}: must be at least 1 and less than {size:,}, the number of"
            " parameters"
        )

    def times(vector: np.ndarray) -> np.ndarray:
        found = product(torch.tensor(vector.reshape(-1)).to(like)).double().cpu().numpy()
        if not np.isfinite(found).all():
            raise ConfigError("the Hessian is not finite, because the model has diverged")
        return found

    operator = LinearOperator((size, size), matvec=times, dtype=np.float64)
    start = generator_for(seed, "Lanczos").standard_normal(size)
    basis = min(size, max(2 * count + 1, 20))
    try:
        values, vectors = eigsh(
            operator, count, which="LA", v0=start, tol=tolerance, ncv=basis, maxiter=100
        )
    except ArpackError as error:
        raise ConfigError(
            f"the eigenvalues did not converge ({error}); use a larger --tolerance, such as 0.01"
        ) from error
    order = np.argsort(-values)
    values, vectors = values[order], vectors[:, order]
    products = np.stack([times(vector) for vector in vectors.T], 1)
    return values, vectors, np.linalg.norm(products - values * vectors, axis=0)
