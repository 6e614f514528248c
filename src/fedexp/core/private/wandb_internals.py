"""Find W&B's background process (wandb-core). If it hangs, it must be killed.

Tested with wandb 0.20 and 0.31.
"""

import subprocess
from contextlib import suppress
from typing import Any


def service_process() -> subprocess.Popen[bytes] | None:
    """Return the wandb-core process, or None if it is not running."""
    with suppress(Exception):
        from wandb.sdk import wandb_setup

        handle: Any = wandb_setup.singleton()._connection._proc  # type: ignore[union-attr]
        return getattr(handle, "_process", None) or handle._internal_proc  # newer and older wandb
    return None
