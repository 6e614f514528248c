"""How torchrun and Slurm's srun tell a process that it is one of several ranks."""

import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from fedexp.core.errors import ConfigError, require

FIRST_PORT, PORTS = 20_000, 10_000  # of rank 0's store in a job of Slurm
TORCHRUN = "TORCHELASTIC_RUN_ID"  # a variable that only torchrun sets
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
OTHERWISE = ", if this process is one of several ranks (of torchrun or srun); otherwise unset RANK"


class Launch(NamedTuple):
    """The rank of this process, the number of ranks, and where rank 0 listens."""

    rank: int
    size: int
    host: str
    port: int


def is_launched(variables: MutableMapping[str, str]) -> bool:
    """Return whether torchrun or srun has started this process together with others.

    With srun, the variables that torch.distributed reads are added. The variables of sbatch do not
    count: its script is one process, however many tasks the job has.

    variables: the environment variables of this process.
    """
    if "RANK" not in variables and number(variables, "SLURM_STEP_NUM_TASKS", 1) > 1:
        step = 100 * int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
        variables["RANK"] = variables["SLURM_PROCID"]
        variables["GROUP_RANK"] = variables["SLURM_NODEID"]  # number of the node, as torchrun's
        variables["WORLD_SIZE"] = variables["SLURM_STEP_NUM_TASKS"]
        variables.setdefault("MASTER_ADDR", first_host(variables["SLURM_STEP_NODELIST"]))
        variables.setdefault("MASTER_PORT", str(FIRST_PORT + step % PORTS))
    return "RANK" in variables and number(variables, "WORLD_SIZE", 1) > 1


def number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable's value as a number. Raises ConfigError if it is not one, or missing."""
    text = variables.get(name, str(default))
    require(text.isdecimal(), name, text, "a number" + OTHERWISE)
    return int(text)


def launch_of(variables: Mapping[str, str]) -> Launch:
    """Return what the variables of a launched process say.

    Raises ConfigError if they cannot be meant, or if torchrun has started the ranks again.
    """
    rank, size = number(variables, "RANK"), number(variables, "WORLD_SIZE")
    require(rank < size, "RANK", rank, f"less than WORLD_SIZE={size}{OTHERWISE}")
    host = variables.get("MASTER_ADDR", "")
    require(bool(host), "MASTER_ADDR", host, f"the host of rank 0{OTHERWISE}")
    port = number(variables, "MASTER_PORT")
    require(0 < port < 1 << 16, "MASTER_PORT", port, f"from 1 to {(1 << 16) - 1}{OTHERWISE}")
    if number(variables, "TORCHELASTIC_RESTART_COUNT", 0):
        raise ConfigError(
            "torchrun has started the ranks again, but --max-restarts is not supported;"
            " continue the run with resume=<run directory>"
        )
    return Launch(rank, size, host, port)


def named(variables: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that say that this process is one of several ranks.

    Without the first one, it is not.
    """
    of_slurm = all(name in variables for name in OF_SLURM) and TORCHRUN not in variables
    return [name for name in (OF_SLURM if of_slurm else NAMES) if name in variables]


def given(variables: Mapping[str, str]) -> str:
    """Return these variables with their values, for messages."""
    return " ".join(f"{name}={variables[name]}" for name in named(variables))


def first_host(nodes: str) -> str:
    """Return the first host of a list of Slurm, such as `gpu[07-09,12],cpu3`."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).partition(",")[0]
