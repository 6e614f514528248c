"""Ranks among the processes started by torchrun or Slurm.

This module does not import torch, because the command uses it first.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

# The names that torchrun and Slurm give to (rank, number of ranks, rank on this host).
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
HOW_TO_START = (
    "start it with torchrun (torchrun --nproc-per-node=2 -m fedexp ...), or with srun where"
    " MASTER_ADDR names the first host"
)


@dataclass(frozen=True)
class Ranks:
    """This process's position among all processes."""

    rank: int  # 0 leads
    size: int  # number of processes on all hosts
    local: int  # number of this process on its host


def find_ranks(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """Return this process's rank, or None if it was started alone.

    Slurm processes without MASTER_ADDR are independent runs.
    """
    if not environment.get("MASTER_ADDR"):
        return None
    for names in LAUNCHERS:
        values = [environment.get(name, "") for name in names]
        if all(value.isdigit() for value in values):
            return Ranks(*map(int, values))
    return None
