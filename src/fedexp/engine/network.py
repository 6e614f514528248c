"""A model as a pure function of its parameters, `net(params, x) -> Output`."""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.memory import free_memory, size_of
from fedexp.core.private.torch_internals import outside_transforms, without_compiler
from fedexp.core.tree import Params
from fedexp.engine.batch_norm import has_batch_norm, has_running_statistics, ignore_padding
from fedexp.models import Output

HEAD_PREFIX = "classifier."  # prefix of the names of the head's parameters
LAYOUT = torch.channels_last  # for parameters and images: the fastest format in oneDNN and cuDNN


class FunctionalNetwork:
    """A model that is called with its parameters, `net(params, x)`.

    The model runs in eval mode, with the buffers from the last call of `set_buffers`. Logits and
    features have the dtype of the parameters, even if the forward pass runs in bf16. `params` must
    contain the trained parameters; all other parameters are stored in this object.
    """

    def __init__(self, module: nn.Module, precision: str, trained: frozenset[str] | None = None):
        """Wrap a model, and change the model to eval mode.

        precision: the precision of the forward pass.
        trained: the names of the trained parameters. None: all parameters with requires_grad=True.
        """
        without_compiler()
        self.trained = frozenset(trainable(module)) if trained is None else trained
        self.module = module.eval().requires_grad_(False)
        self.precision = precision
        self.dtype = next(self.module.parameters()).dtype
        self.names = frozenset(self.module.state_dict())
        self.known = KnownFeatures()
        self._training: nn.Module | None = None  # a copy in train mode, created on first use

    def __call__(self, params: Params, x: Tensor, mask: Tensor | None = None) -> Output:
        weights = self.own(params)
        return self._forward(lambda: functional_call(self.module, weights, (x,)), weights, x, mask)

    def call_in_training(
        self, params: Params, buffers: Params, x: Tensor, mask: Tensor | None = None
    ) -> Output:
        """Return the output in train mode, and update the running statistics `buffers` in place."""
        if self._training is None:
            with outside_transforms():  # a copy made inside a transform is unusable afterwards
                self._training = copy.deepcopy(self.module).train()
        module, values = self._training, self.own(params) | buffers
        return self._forward(lambda: functional_call(module, values, (x,)), values, x, mask)

    def copy(self, device: torch.device | None = None) -> "FunctionalNetwork":
        """Return a copy of the network on the given device."""
        module = copy.deepcopy(self.module).to(device)
        return FunctionalNetwork(module, self.precision, self.trained)

    def parameters(self) -> Params:
        """Return the trained parameters of the module. The tensors are not copied."""
        return {k: v for k, v in self.module.named_parameters() if k in self.trained}

    def own(self, params: Params) -> Params:
        """Return the parameters of the model, without parameters that the algorithm added.

        An algorithm may add, for example, a second head.
        """
        if params.keys() <= self.names:
            return params
        return {k: v for k, v in params.items() if k in self.names}

    def gradient(
        self, function: Callable[[Params], Tensor], params: Params, moves: bool = True
    ) -> tuple[Params, Tensor]:
        """Return the gradient and the value of a scalar function of the parameters."""
        return grad_and_value(function)(params)

    def slim(self, params: Params, x: Tensor, width: float, mask: Tensor | None = None) -> Tensor:
        """Return the output of the model's last stage, computed with fewer channels.

        The model must implement models.Staged. The stage never runs in bf16.

        width: the fraction of the channels to use.
        """
        whole = dict(self.module.named_parameters()) | params
        with ignore_padding(mask):
            return self.module.slim(whole, x, width)  # type: ignore[operator]

    def norm_inputs(self, params: Params, x: Tensor) -> tuple[Output, list[tuple[Tensor, ...]]]:
        """Return the output in eval mode, and statistics of the inputs of the batch norm layers.

        For each batch norm layer with running statistics, these are the mean and the variance of
        the layer's input over x, and the layer's running mean and running variance.
        """
        found: list[tuple[Tensor, ...]] = []

        def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            value, dims = inputs[0], [0, *range(2, inputs[0].dim())]
            here = value.mean(dims), value.var(dims, correction=0)
            found.append((*here, layer.running_mean, layer.running_var))  # type: ignore[arg-type]

        with contextlib.ExitStack() as stack:
            for layer in self.module.modules():
                if has_running_statistics(layer):
                    stack.callback(layer.register_forward_pre_hook(look).remove)
            return self(params, x), found

    def hidden_activations(self, params: Params, x: Tensor) -> tuple[Tensor, ...]:
        """Return the activations after the ReLU of each fully connected hidden layer, [B, d] each.

        The network must have the method `hidden_activations`.
        """
        weights = {f"module.{name}": value for name, value in self.own(params).items()}
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return functional_call(Neurons(self.module), weights, (x,))

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Set the buffers (the running statistics of batch norm)."""
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name])

    def buffers(self) -> Params:
        return {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}

    @cached_property
    def _backbone(self) -> frozenset[str]:
        """Return the names of the parameters that affect the features."""
        names = dict(self.module.named_parameters())
        return frozenset(name for name in names if not name.startswith(HEAD_PREFIX))

    def _run_head(self, params: Params, features: Tensor) -> Output:
        head = {
            k.removeprefix(HEAD_PREFIX): v for k, v in params.items() if k.startswith(HEAD_PREFIX)
        }
        layer = self.module.get_submodule("classifier")
        return Output(features, functional_call(layer, head, (features,)))

    def _forward(
        self, call: Callable[[], Output], params: Params, x: Tensor, mask: Tensor | None
    ) -> Output:
        """Return the output of `call`, but run only the head if the features of x are known."""
        features = self.known.get(x)
        if features is not None and self._backbone.isdisjoint(params):
            call = partial(self._run_head, params, features)
        with ignore_padding(mask):
            if self.precision != "bf16":
                return call()
            with torch.autocast(x.device.type, torch.bfloat16):
                features, logits, maps = call()
        # see models.own.LogitsOnly
        features = features if features is None else features.to(self.dtype)
        return Output(features, logits.to(self.dtype), tuple(map.to(self.dtype) for map in maps))


class KnownFeatures:
    """The features of the inputs that were loaded last, if a frozen backbone has computed them.

    The features are used only for the same tensor of inputs. For inputs that an algorithm has
    changed, the backbone runs again.
    """

    def __init__(self) -> None:
        self.set(None, None)

    def set(self, x: Tensor | None, features: Tensor | None) -> None:
        """Store the features [..., D] of the inputs x. None: the features are not known."""
        self._x = None if features is None else x
        self._features = features
        self._version = 0 if self._x is None else self._x._version

    def get(self, x: Tensor) -> Tensor | None:
        """Return the features of the inputs x, or None if they are not known."""
        if x is not self._x or x._version != self._version or x.requires_grad:
            return None
        return self._features


def trainable(module: nn.Module) -> Params:
    """Return the parameters that clients train and send: those with requires_grad=True."""
    return {k: v for k, v in module.named_parameters() if v.requires_grad}


class Neurons(nn.Module):
    """Module whose output is the hidden activations of a model."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.module.hidden_activations(x)  # type: ignore[operator]


class LiveNetwork(FunctionalNetwork):
    """A model in training.

    The parameters in a call select the mode. The model runs in train mode with the attribute
    `params` of this object, or with the parameters for which `gradient` computes a gradient. It
    runs in eval mode with any other parameters, such as those of a teacher. The optimizer updates
    the tensors in `params` in place.
    """

    def __init__(self, frozen: FunctionalNetwork):
        self.frozen, self.trained, self.names = frozen, frozen.trained, frozen.names
        self.precision, self.dtype, self.known = frozen.precision, frozen.dtype, frozen.known
        self.module = copy.deepcopy(frozen.module).train()
        self.mixes_examples = has_batch_norm(self.module)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in self.trained)
        self._own: Params = trainable(self.module)
        self.params: Params = self._own
        self._moving: Params | None = None

    def __call__(self, params: Params, x: Tensor, mask: Tensor | None = None) -> Output:
        if params is self.params:
            return self._forward(lambda: self.module(x), self._own, x, mask)
        if params is self._moving:
            return super().__call__(params, x, mask)
        return self.frozen(params, x, mask)

    def norm_inputs(self, params: Params, x: Tensor) -> tuple[Output, list[tuple[Tensor, ...]]]:
        return self.frozen.norm_inputs(params, x)

    def gradient(
        self, function: Callable[[Params], Tensor], params: Params, moves: bool = True
    ) -> tuple[Params, Tensor]:
        before = {} if moves else self.buffers()
        self._moving = {name: value.detach().requires_grad_() for name, value in params.items()}
        with torch.enable_grad():
            value = function(self._moving)
            # materialize_grads: zeros for unused parameters, as in torch.func.grad
            grads = torch.autograd.grad(value, list(self._moving.values()), materialize_grads=True)
        self._moving = None
        with torch.no_grad():
            if before:
                self.set_buffers(before)
        return dict(zip(params, grads, strict=True)), value.detach()

    @torch.no_grad()
    def load(self, params: Params, buffers: Mapping[str, Tensor]) -> None:
        """Copy the given parameters and running statistics into the model.

        If `params` contains running statistics, they take precedence over `buffers`.
        """
        for name, parameter in self._own.items():
            parameter.copy_(params[name])
        # parameters that an algorithm adds to the model
        names = params.keys() - self._own.keys() - buffers.keys()
        extra = {k: v.clone().requires_grad_() for k, v in params.items() if k in names}
        self.params = self._own | extra if extra else self._own
        for name, buffer in self.module.named_buffers():
            buffer.copy_(params.get(name, buffers[name]))

    def snapshot(self) -> Params:
        """Return a copy of the parameters without gradients."""
        return {name: parameter.detach().clone() for name, parameter in self.params.items()}


@contextlib.contextmanager
def default_torch() -> Iterator[None]:
    """Use torch's own default dtype, device and gradient mode, and no autocast, in the block.

    A notebook may have changed them, which would change the results of a run. The caller's settings
    are restored afterwards, and so are those that `Resolved.apply` changes. Other ranks are
    started with torch's defaults.
    """
    dtype, backends = torch.get_default_dtype(), torch.backends
    with contextlib.ExitStack() as held:
        held.callback(torch.set_num_threads, torch.get_num_threads())
        for part in (backends.cuda.matmul, backends.cudnn):
            held.callback(setattr, part, "allow_tf32", part.allow_tf32)
        held.callback(setattr, backends.cudnn, "deterministic", backends.cudnn.deterministic)
        if torch.cuda.is_initialized():
            held.enter_context(torch.cuda.device(torch.cuda.current_device()))
        held.enter_context(torch.inference_mode(False))
        held.enter_context(torch.enable_grad())
        # only if needed, as the mode slows down every call of torch; torch 2.6's
        # get_default_device() does not return the device of `with torch.device(...)`
        if torch.empty(0).device.type != "cpu":
            held.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                held.enter_context(torch.autocast(device, enabled=False))
        held.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


@contextlib.contextmanager
def flush_subnormals() -> Iterator[None]:
    """Treat subnormal numbers, below about 1e-38 in fp32, as zero while the block runs.

    Some CPUs compute slowly with such numbers: a round took 1.2 times as long. The setting applies
    to the current thread and to the threads that torch starts from it. The previous setting is
    restored afterwards, because other libraries may need subnormal numbers.
    """
    before = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def require_memory(make: Callable[[], torch.nn.Module]) -> None:
    """Raise ConfigError if the parameters of a model do not fit into the free memory.

    To find their size, the model is created without allocating memory.

    make: a function that creates the model.
    """
    try:
        with torch.device("meta"):
            size = tree.num_bytes(dict(make().state_dict()))
    except Exception as error:
        if "overflow" not in str(error):
            # The same error occurs, and is reported, when the model is really created.
            return
        size = 2**63
    free = free_memory()
    if size > free:
        raise ConfigError(
            f"model: the parameters need {size_of(size)}, but must fit into the free memory of"
            f" {size_of(free)}"
        )
