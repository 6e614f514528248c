"""How convolutions of clients with weights of their own are best computed on a GPU: milliseconds of
a forward and a backward pass of the two convolutions of W1's model, for some numbers of clients,
recorded as a CUDA graph.

- grouped: one convolution with a group for each client, as torch.func.vmap has it
- streams: one convolution for each client, side by side, and what fedexp has for images
  (hardware.convolution=streams)
- patches: the patches written out, and one batched matrix product for all clients
"""

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from benchmarks import measure
from fedexp.engine.vectorised.convolution import convolve

CLIENTS, BATCH, KERNEL = (1, 2, 4, 10), 50, 5
LAYERS = {"3 to 32 channels, 32 x 32": (3, 32, 32), "32 to 64 channels, 16 x 16": (32, 64, 16)}
PRECISIONS = ("fp32", "tf32", "bf16")
PADDING = (KERNEL // 2, KERNEL // 2)
Convolution = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def patches(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute F.conv2d(x, weight, padding=PADDING)."""
    image = F.pad(x.permute(0, 2, 3, 1), (0, 0, *PADDING, *PADDING))
    windows = image.unfold(1, KERNEL, 1).unfold(2, KERNEL, 1)  # [B, H, W, C, h, w], a view
    rows = windows.permute(0, 1, 2, 4, 5, 3).flatten(3) @ weight.permute(2, 3, 1, 0).flatten(0, 2)
    return rows.permute(0, 3, 1, 2)


WAYS: dict[str, Convolution] = {
    "grouped": lambda x, weight: F.conv2d(x, weight, padding=PADDING),
    "streams": lambda x, weight: convolve(x, weight, None, PADDING),
    "patches": patches,
}


def step(
    way: Convolution, clients: int, layer: tuple[int, int, int], dtype: torch.dtype
) -> Callable[[], object]:
    """Do a forward and a backward pass; images themselves need no gradient."""
    inputs, outputs, side = layer
    x = torch.randn(clients, BATCH, side, side, inputs, device="cuda", dtype=dtype).permute(
        0, 1, 4, 2, 3
    )
    weight = torch.randn(
        clients, outputs, KERNEL, KERNEL, inputs, device="cuda", dtype=dtype
    ).permute(0, 1, 4, 2, 3)
    arguments = (1,) if inputs == 3 else (0, 1)
    return lambda: vmap(grad(lambda x, weight: way(x, weight).sum(), argnums=arguments))(x, weight)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the milliseconds of one replay of its CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def table(repeats: int) -> str:
    rows = []
    for precision in PRECISIONS:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
            precision != "fp32"
        )
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for name, layer in LAYERS.items():
            for way, function in WAYS.items():
                times = [
                    milliseconds(step(function, clients, layer, dtype), repeats)
                    for clients in CLIENTS
                ]
                rows.append((precision, name, way, *(f"{time:.3f}" for time in times)))
                print(*rows[-1], flush=True)
    return measure.markdown(("", "layer", "way", *(f"{n} clients, ms" for n in CLIENTS)), rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convolutions", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "benchmarks.convolutions: torch finds no CUDA device on this machine", file=sys.stderr
        )
        return 2
    torch.backends.cudnn.deterministic = True  # as in fedexp
    head = (
        f"{measure.machine()}. Batches of {BATCH}, kernels of {KERNEL} x {KERNEL}, deterministic;"
        f" n={options.repeats}."
    )
    measure.write_section("Convolutions on a GPU", f"{head}\n\n{table(options.repeats)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
