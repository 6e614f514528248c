"""`fedexp --version`: the versions that decide what a run computes and how it is read."""

import platform
from importlib.metadata import PackageNotFoundError, version

import fedexp

PACKAGES = ("fedexp", "torch", "torchvision", "numpy", "hydra-core", "omegaconf", "wandb")


def version_text() -> str:
    """Return one line for each of fedexp, the packages that matter, Python, and CUDA as torch sees
    it."""
    lines = [f"{name} {installed(name)}" for name in PACKAGES]
    return "\n".join(
        [*lines, f"Python {platform.python_version()} ({platform.platform()})", f"CUDA {cuda()}"]
    )


def installed(name: str) -> str:
    """Return the version of a package; that of fedexp is its own, which may be run from its source
    alone."""
    if name == "fedexp":
        return fedexp.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def cuda() -> str:
    """Return the version of CUDA that torch was built with, and the first device that it finds."""
    import torch

    if torch.version.cuda is None:
        return "none (torch was built without it)"
    found = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no device"
    return f"{torch.version.cuda}, {found}"
