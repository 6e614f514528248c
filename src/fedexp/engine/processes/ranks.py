"""Find the rank of this process among the processes that torchrun or Slurm started.

This module does not import torch, because the command line uses it before torch is needed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

# The environment variables in which torchrun and Slurm pass the rank, the number of ranks and the
# rank on this host.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
HOW_TO_START = (
    "start the command with torchrun (torchrun --nproc-per-node=2 -m fedexp ...), or with srun and"
    " set MASTER_ADDR to the name of the first host"
)


@dataclass(frozen=True)
class Ranks:
    """The position of this process among all processes of the run."""

    rank: int  # rank 0 leads the run
    size: int  # number of processes on all hosts
    local: int  # number of this process on its host


def find_ranks(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """Return the ranks, or None if this process was started alone.

    If MASTER_ADDR is not set, the processes that Slurm started are independent runs.
    """
    if not environment.get("MASTER_ADDR"):
        return None
    for names in LAUNCHERS:
        values = [environment.get(name, "") for name in names]
        if all(value.isdigit() for value in values):
            return Ranks(*map(int, values))
    return None
