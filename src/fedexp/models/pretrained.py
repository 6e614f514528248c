"""Networks from torchvision and timm, with random or published weights.

All parameters or only some of them can be trained.
"""

import os
import ssl
import urllib.error
import urllib.request
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedexp.core.errors import ConfigError, nearest, reason_of, require
from fedexp.core.limits import CountOrNone
from fedexp.core.packages import import_extra
from fedexp.models.own import Headed, LogitsOnly, OwnModel, Reading
from fedexp.models.resnet import load_weights

# value of model.weights: use the weights that the library recommends, downloaded into its cache
DEFAULT = "DEFAULT"
# normalisation of torchvision's published weights, except the networks in OF_HALVES
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WITHOUT_BRANCHES = ("googlenet", "inception_v3")  # networks whose auxiliary outputs are removed
# The weights of these networks come from TensorFlow and expect pixels from -1 to 1. torchvision's
# GoogLeNet and Inception with weights convert images from ImageNet's normalisation to this range
# (`transform_input`).
OF_HALVES = ("efficientnet_v2_l", *WITHOUT_BRANCHES)
HALVES = (0.5, 0.5, 0.5)
SECONDS = 15  # to wait for the answer of a server
# Environment variables that torch.load reads. ONLY forces weights_only=True. ALL must not be set at
# the same time.
ONLY, ALL = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextmanager
def weights_only() -> Iterator[None]:
    """Make torch.load read only tensors and plain values inside the `with` block.

    This also applies to libraries that call torch.load. Older versions of timm would otherwise
    unpickle arbitrary objects.
    """
    before = {name: os.environ.pop(name, None) for name in (ONLY, ALL)}
    os.environ[ONLY] = "1"
    try:
        yield
    finally:
        del os.environ[ONLY]
        os.environ.update({name: value for name, value in before.items() if value is not None})


class Pretrained(OwnModel):
    """Base class of models whose network is provided by a library and selected by name."""

    name: str
    weights: str | None  # a file; DEFAULT: the library's recommended weights; None: random weights
    image_size: CountOrNone  # height and width in pixels to which images are resized

    def __post_init__(self) -> None:
        super().__post_init__()
        there = self.weights in (None, DEFAULT) or Path(str(self.weights)).is_file()
        require(there, "model.weights", self.weights, "a file that exists, DEFAULT or null")

    @abstractmethod
    def reading(self, network: nn.Module) -> Reading:
        """Return the module that converts images to the inputs that the network expects."""

    def build(self, shape: Any, num_classes: int) -> Headed | LogitsOnly:
        """Return the network with a new last layer.

        shape: (channels, height, width) of the images.
        """
        if shape[0] not in (1, 3):
            raise ConfigError(
                f"model.name={self.name}: needs images with 1 or 3 channels, but the images have"
                f" {shape[0]}"
            )
        network = self.network(shape, num_classes)
        head = self.head or last_linear(network, num_classes)
        return self.finish(network, head, shape, num_classes, self.reading(network))


class Torchvision(Pretrained):
    """A classification network from torchvision.

    Images keep their size unless `image_size` is given. If weights are used, images are normalised
    as they were when the weights were trained. Otherwise they are normalised with dataset.mean and
    dataset.std.
    """

    def reading(self, network: nn.Module) -> Reading:
        size = None if self.image_size is None else (self.image_size, self.image_size)
        if self.weights is None:
            return Reading(size, None, None)
        return Reading(size, *self.normalisation())

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and standard deviation per channel that the published weights expect."""
        return (HALVES, HALVES) if self.name in OF_HALVES else (IMAGENET_MEAN, IMAGENET_STD)

    def network(self, shape: Any, num_classes: int) -> nn.Module:
        from torchvision import models  # slow to import, and few models need it

        known = models.list_models(module=models)
        if self.name not in known:
            raise ConfigError(
                f"model.name={self.name}: torchvision has no classification network with this"
                f" name{nearest(self.name, known)}"
            )
        extra = {"aux_logits": False, "init_weights": True} if self.name in WITHOUT_BRANCHES else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network = models.get_model(self.name, weights=None, num_classes=num_classes, **extra)
        if self.weights is not None and not next(network.parameters()).is_meta:
            head = self.head or last_linear(network, num_classes) or ""
            found = self.published_weights() if self.weights == DEFAULT else None
            load_weights(network, self.weights, head, f"torchvision's {self.name}", found)
        return network

    def published_weights(self) -> Any:
        """Return the state dict that torchvision recommends, downloaded if necessary."""
        from torchvision.models import get_model_weights

        weights: Any = get_model_weights(self.name).DEFAULT  # type: ignore[attr-defined]
        try:
            return weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise not_downloaded(self.name, weights.url, error) from error


class Timm(Pretrained):
    """A network from timm. Images are resized and normalised as the network requires."""

    def reading(self, network: nn.Module) -> Reading:
        from timm.data import resolve_model_data_config

        wants = resolve_model_data_config(network)
        size = tuple(wants["input_size"][1:])
        if self.image_size is not None:
            size = (self.image_size, self.image_size)
        known = wants["interpolation"] in ("bilinear", "bicubic")
        interpolation = wants["interpolation"] if known else "bilinear"
        return Reading(size, wants["mean"], wants["std"], interpolation)

    @weights_only()
    def network(self, shape: Any, num_classes: int) -> nn.Module:
        timm = import_extra("timm", "timm", "model=timm")
        if not timm.is_model(self.name.partition(".")[0]):
            raise ConfigError(
                f"model.name={self.name}: timm has no network with this"
                f" name{nearest(self.name, timm.list_models())}"
            )
        # on the meta device, weights are not needed
        pretrained = self.weights is not None and not torch.empty(0).is_meta
        options: dict[str, Any] = {"num_classes": num_classes, "pretrained": pretrained}
        of_file = self.weights not in (None, DEFAULT)
        address = self.address() if pretrained and not of_file else ""
        if address:
            require_answer(self.name, address)
        if of_file:
            options["pretrained_cfg_overlay"] = {"file": str(self.weights)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                network = self.create(options)
                if of_file and pretrained:
                    self.require_all(network, num_classes)
                return network
        except ConfigError:
            raise
        except Exception as error:  # timm raises many types for an invalid file
            if self.weights == DEFAULT:
                raise not_downloaded(self.name, address or "its server", error) from error
            reason = reason_of(error).partition(". ")[0]
            where = f"model.weights={self.weights}" if self.weights else f"model.name={self.name}"
            raise ConfigError(f"{where}: timm cannot create {self.name} ({reason})") from error

    def address(self) -> str:
        """Return the address of the recommended weights, or "" if the hub's cache has them."""
        import timm
        from huggingface_hub import hf_hub_url, try_to_load_from_cache

        config = timm.get_pretrained_cfg(self.name)
        if config is None or not config.hf_hub_id:
            url = config.url if config else None
            return url if isinstance(url, str) else ""
        name = config.hf_hub_filename
        names = [name] if name else ["model.safetensors", "pytorch_model.bin"]
        if any(isinstance(try_to_load_from_cache(config.hf_hub_id, each), str) for each in names):
            return ""
        return hf_hub_url(config.hf_hub_id, names[0])

    def require_all(self, network: nn.Module, num_classes: int) -> None:
        """Raise ConfigError unless the weights file contains all parameters except the head's.

        This check is needed because timm silently skips parameters that are missing in the file.
        """
        from timm.models import load_state_dict

        head = f"{self.head or last_linear(network, num_classes)}."
        lacks = dict(network.named_parameters()).keys() - load_state_dict(str(self.weights)).keys()
        lost = sorted(k for k in lacks if not k.startswith(head))
        if lost:
            raise ConfigError(
                f"model.weights={self.weights}: the parameter {lost[0]} is missing; must be a file"
                f" with timm's weights for {self.name}"
            )

    def create(self, options: dict[str, Any]) -> nn.Module:
        """Create the network.

        A network with a fixed input size, such as a vision transformer, is created for
        `image_size`.
        """
        import timm

        if self.image_size is not None:
            try:
                return timm.create_model(self.name, img_size=self.image_size, **options)
            except TypeError:  # this network accepts images of any size
                pass
        return timm.create_model(self.name, **options)


def last_linear(network: nn.Module, num_classes: int) -> str | None:
    """Return the name of the last linear layer with one output per class, or None."""
    found = None
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear) and layer.out_features == num_classes:
            found = name
    return found


def require_answer(name: str, address: str) -> None:
    """Raise ConfigError if no server answers, since libraries try again for a minute.

    name: the network. address: of its weights.
    """
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, method="HEAD"), timeout=SECONDS
        ):
            pass
    except urllib.error.HTTPError:
        pass  # the library may know another file, or a password
    except OSError as error:
        if not isinstance(getattr(error, "reason", error), ssl.SSLError):  # other certificates
            raise not_downloaded(name, address, error) from error


def not_downloaded(name: str, address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.weights={DEFAULT}: the weights for {name} cannot be downloaded from {address}"
        f" ({reason_of(error)}); download this file on another machine and set model.weights=<file>"
    )
