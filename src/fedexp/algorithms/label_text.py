"""Embeddings of class names, the anchors of LANDER: from a file, or random vectors instead."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedexp.core.errors import ConfigError
from fedexp.core.npz import load_npz
from fedexp.core.rng import generator_for
from fedexp.core.storage import regular
from fedexp.models import Output, classifier_of

RANDOM = "random"  # value of algorithm.embeddings: vectors drawn at random, without text
KEY = "algorithm.embeddings"


def embeddings(source: str | None, classes: int, width: int) -> np.ndarray:
    """Return the embeddings, float64 [classes, E].

    They are the rows of a file or, for `RANDOM`, vectors of `width` standard normal numbers, which
    are the same in every run. Raises ConfigError if there is no source, or if the file does not
    contain a finite matrix with one row per class.
    """
    if source is None:
        raise ConfigError(
            f"{KEY}: LANDER needs an embedding of each class name; {KEY}=<file> names a .npy, .npz"
            f" or .csv file with one row for each class, {KEY}={RANDOM} does without text"
        )
    if source == RANDOM:
        return generator_for(0, "label embeddings").standard_normal((classes, width))
    matrix = read_matrix(Path(source))
    if matrix.ndim != 2 or matrix.shape[0] != classes or not matrix.size:
        shape = " x ".join(map(str, matrix.shape))
        raise ConfigError(
            f"{KEY}={source}: has {shape} numbers; must be a matrix of {classes} rows, one a class"
        )
    if not np.isfinite(matrix).all():
        raise ConfigError(f"{KEY}={source}: has numbers that are not finite")
    return matrix


def read_matrix(path: Path) -> np.ndarray:
    """Return the matrix in a .npy, .npz or .csv file as float64.

    If there are several arrays, it is the array named `embeddings`.
    """
    if path.suffix not in (".npy", ".npz", ".csv"):
        raise ConfigError(f"{KEY}={path}: must be a .npy, .npz or .csv file, or {RANDOM}")
    try:
        if path.suffix == ".npz":
            arrays = load_npz(path)
            name = next(iter(arrays)) if len(arrays) == 1 else "embeddings"
            if name not in arrays:
                raise ConfigError(
                    f"{KEY}={path}: none of its arrays {', '.join(arrays)} is named embeddings"
                )
            found = arrays[name]
        elif path.suffix == ".npy":
            found = np.load(regular(path), allow_pickle=False)
        else:
            found = np.loadtxt(regular(path), delimiter=",", ndmin=2)
        return np.asarray(found).astype(np.float64)
    except OSError as error:
        raise ConfigError(f"{KEY}={path}: cannot be read ({error.strerror})") from error
    # a header may declare more data than fits into memory
    except (ValueError, EOFError, MemoryError) as error:
        raise ConfigError(f"{KEY}={path}: is not a matrix of numbers ({error})") from error


def add_mapping(module: nn.Module, width: int) -> nn.Module:
    """Add a linear layer `mapping` from the classifier's input to the space of the embeddings.

    The model's features are then the outputs of that layer. Its logits and the names of its other
    parameters do not change.
    """
    module.mapping = nn.Linear(classifier_of(module).in_features, width)
    module.register_forward_hook(map_features)
    return module


def map_features(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: Output) -> Output:
    return output._replace(features=module.get_submodule("mapping")(output.features))
