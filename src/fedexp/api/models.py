"""Evaluate saved models on a data set, and export their weights for use in other programs."""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from fedexp import __version__
from fedexp.analysis.evaluation import Evaluation, evaluate_run
from fedexp.analysis.networks import load_network
from fedexp.api.directories import Run, load_run, trusted_classes
from fedexp.cli.composition import quoted
from fedexp.cli.evaluate import read_dataset
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.packages import how_to_install
from fedexp.data.datasets import Dataset
from fedexp.data.types import DataSource

WITH_TORCH, SAFETENSORS = (".pt", ".pth"), ".safetensors"


def evaluate(
    run: str | os.PathLike[str],
    dataset: str | None = None,
    round: int | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
    config_dir: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Evaluate a saved model from a run on a test set.

    run: a `Run`, or its directory.

    dataset: an option of the group `dataset`, or None for the run's data set, including all tasks.
    Classes are matched to the run's classes by name. Images are converted to the size, channels and
    normalisation of the run's images.

    round: the round of the model, or None for the last saved model.

    overrides: changes to the data set, such as ["dataset.root=photos"].

    device: auto, cpu, cuda or cuda:<number>.

    config_dir: a directory with your own config groups, see `load_run`.

    data_dir: the directory that contains the data sets, or None for the directory that the run
    used.

    Raises ConfigError if the model and the data are incompatible.
    """
    found = run if isinstance(run, Run) and config_dir is None else load_run(run, config_dir)
    given = [*([f"dataset={dataset}"] if dataset is not None else []), *overrides]
    if data_dir is not None:
        given.append(f"data_dir={quoted(os.fspath(data_dir))}")
    source, data_dir = read_dataset(given, found.config_dir)
    with trusted_classes(found.config_dir):
        return evaluate_run(found._reader, source, round, device, data_dir)


def export(
    run: str | os.PathLike[str], path: str | os.PathLike[str], round: int | None = None
) -> Path:
    """Write the weights of a saved model to a file, and return the path of the file.

    run: a `Run`, or its directory.

    path: the file. Its suffix determines the format: `.safetensors` (this needs the package
    safetensors), or `.pt` or `.pth` (`torch.save` of the state dict). The metadata in a safetensors
    file contain the algorithm, the data set, the model, the round, the seed and the normalisation
    of pixels.

    round: the round of the model, or None for the last saved model.

    Tensors have the same names as in `run.model().network`. Low-rank adapters are merged into their
    layers. Raises ConfigError for any other suffix.
    """
    found, target = run if isinstance(run, Run) else load_run(run), Path(path).expanduser()
    if target.suffix not in (*WITH_TORCH, SAFETENSORS):
        raise ConfigError(f"{target}: must end in {SAFETENSORS}, {' or '.join(WITH_TORCH)}")
    write = safetensors_writer() if target.suffix == SAFETENSORS else to_torch_bytes
    with trusted_classes(found.config_dir):
        network, kept, parts = load_network(found._reader, round)
    weights = {
        name: value.contiguous() for name, value in with_plain_layers(network).state_dict().items()
    }
    storage.write_atomically(
        target, write(weights, export_metadata(found, kept.round, parts.dataset))
    )
    return target


def with_plain_layers(network: nn.Module) -> nn.Module:
    """Replace each module that has a method `plain` by the layer that it returns, in place.

    For example, a low-rank adapter returns its layer with the sum of the weights.
    """
    for name, module in list(network.named_modules()):
        if hasattr(module, "plain"):
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, module.plain())
    return network


def export_metadata(run: Run, round: int, dataset: DataSource) -> dict[str, str]:
    """Return the metadata of an exported model.

    For images, pixels are normalised as (pixel / pixel_largest - mean) / std.
    """
    choices = run.config.get("choices") or {}
    facts: dict[str, object] = {"fedexp": __version__, "round": round}
    facts |= {"seed": run.config.get("seed")}
    facts |= {name: choices.get(name) for name in ("algorithm", "dataset", "model")}
    if isinstance(dataset, Dataset):
        form = dataset.normalise
        facts |= {"pixel_largest": form.max_value, "mean": [*form.mean], "std": [*form.std]}
    return {name: str(value) for name, value in facts.items()}


def to_torch_bytes(weights: dict[str, torch.Tensor], facts: dict[str, str]) -> bytes:
    """Return a state dict as bytes written by `torch.save`.

    facts: ignored, since the format has no metadata.
    """
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


def safetensors_writer() -> Callable[[dict[str, torch.Tensor], dict[str, str]], bytes]:
    """Return the function of safetensors that converts tensors and metadata to bytes.

    Raises ConfigError if safetensors is not installed.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise ConfigError(
            f"{SAFETENSORS}: needs the package safetensors: {how_to_install('safetensors')};"
            " the format .pt needs no extra package"
        ) from None
    return save
