"""How torchrun and Slurm's srun tell a process that it is one of several ranks."""

import re
from collections.abc import MutableMapping

FIRST_PORT, PORTS = 20_000, 10_000  # of rank 0's store in a job of Slurm


def is_launched(variables: MutableMapping[str, str]) -> bool:
    """Return whether torchrun or srun has started this process together with others.

    With srun, the variables that torch.distributed reads are added. The variables of sbatch do not
    count: its script is one process, however many tasks the job has.

    variables: the environment variables of this process.
    """
    if "RANK" not in variables and int(variables.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        step = 100 * int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
        variables["RANK"] = variables["SLURM_PROCID"]
        variables["GROUP_RANK"] = variables["SLURM_NODEID"]  # number of the node, as torchrun's
        variables["WORLD_SIZE"] = variables["SLURM_STEP_NUM_TASKS"]
        variables.setdefault("MASTER_ADDR", first_host(variables["SLURM_STEP_NODELIST"]))
        variables.setdefault("MASTER_PORT", str(FIRST_PORT + step % PORTS))
    return "RANK" in variables and int(variables.get("WORLD_SIZE", 1)) > 1


def first_host(nodes: str) -> str:
    """Return the first host of a list of Slurm, such as `gpu[07-09,12],cpu3`."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).partition(",")[0]
