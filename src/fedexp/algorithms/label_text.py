"""LANDER's anchors: embeddings of class names from a file, or random vectors in their place."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedexp.core.errors import ConfigError
from fedexp.core.npz import load_npz
from fedexp.core.rng import generator_for
from fedexp.core.storage import regular
from fedexp.models import Output, classifier_of

RANDOM = "random"  # value of algorithm.embeddings: random vectors instead of text embeddings
KEY = "algorithm.embeddings"


def embeddings(source: str | None, classes: int, width: int) -> np.ndarray:
    """Return the embeddings, float64 [classes, E].

    The embeddings are the rows of the file `source`. If `source` is `RANDOM`, they are vectors of
    `width` standard normal numbers, the same in every run. Raises ConfigError if `source` is None
    or if the file does not contain a finite matrix with one row per class.
    """
    if source is None:
        raise ConfigError(
            f"{KEY}: LANDER needs an embedding of each class name; set {KEY}=<file> to a .npy, .npz"
            f" or .csv file with one row per class, or set {KEY}={RANDOM} to use random vectors"
        )
    if source == RANDOM:
        return generator_for(0, "label embeddings").standard_normal((classes, width))
    matrix = read_matrix(Path(source))
    if matrix.ndim != 2 or matrix.shape[0] != classes or not matrix.size:
        shape = " x ".join(map(str, matrix.shape))
        raise ConfigError(
            f"{KEY}={source}: the array has shape {shape}, but must be a matrix with"
            f" {classes} rows, one per class"
        )
    if not np.isfinite(matrix).all():
        raise ConfigError(f"{KEY}={source}: the file contains numbers that are not finite")
    return matrix


def read_matrix(path: Path) -> np.ndarray:
    """Return the matrix in a .npy, .npz or .csv file as float64.

    If a .npz file contains several arrays, the array named `embeddings` is returned.
    """
    if path.suffix not in (".npy", ".npz", ".csv"):
        raise ConfigError(
            f"{KEY}={path}: must be {RANDOM} or the path of a .npy, .npz or .csv file"
        )
    try:
        if path.suffix == ".npz":
            arrays = load_npz(path)
            name = next(iter(arrays)) if len(arrays) == 1 else "embeddings"
            if name not in arrays:
                raise ConfigError(
                    f"{KEY}={path}: the file has several arrays ({', '.join(arrays)}), but none is"
                    " named embeddings"
                )
            found = arrays[name]
        elif path.suffix == ".npy":
            found = np.load(regular(path), allow_pickle=False)
        else:
            found = np.loadtxt(regular(path), delimiter=",", ndmin=2)
        return np.asarray(found).astype(np.float64)
    except OSError as error:
        raise ConfigError(f"{KEY}={path}: the file cannot be read ({error.strerror})") from error
    # a header may declare more data than fits into memory
    except (ValueError, EOFError, MemoryError) as error:
        raise ConfigError(
            f"{KEY}={path}: the file does not contain a matrix of numbers ({error})"
        ) from error


def add_mapping(module: nn.Module, width: int) -> nn.Module:
    """Add a linear layer `mapping` from the classifier's input to the space of the embeddings.

    The outputs of this layer become the model's features. The model's logits and the names of its
    other parameters do not change.
    """
    module.mapping = nn.Linear(classifier_of(module).in_features, width)
    module.register_forward_hook(map_features)
    return module


def map_features(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: Output) -> Output:
    return output._replace(features=module.get_submodule("mapping")(output.features))
