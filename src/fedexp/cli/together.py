"""Jobs of a sweep that run as one program (`hardware.jobs_together`): each waits until there are
enough like it.

Hydra hands over one job after another. Those that may be trained together are kept until their
group is complete or the sweep has no more; then all of the group run in lockstep, see
`fedexp.training.lockstep`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from fedexp.training.place import Job

AUTO = 8  # jobs together on a GPU
# What the jobs of a group have in common: all that decides the shapes and the steps of their
# clients.
COMMON = (
    "dataset",
    "model",
    "algorithm",
    "scenario",
    "local",
    "rounds",
    "forgetting_metric",
    "analysis",
    "hardware",
)


@dataclass
class Groups:
    """The jobs of the sweeps of one command that wait for others."""

    waiting: dict[str, list["Member"]] = field(default_factory=dict)

    def add(self, member: "Member", size: int) -> None:
        """Take a job; run its group where that is complete."""
        group = self.waiting.setdefault(
            key := json.dumps(common(member.config), sort_keys=True, default=str), []
        )
        group.append(member)
        if len(group) == size:
            del self.waiting[key]
            run_together(group)

    def finish(self) -> None:
        """Run what still waits."""
        while self.waiting:
            run_together(self.waiting.pop(next(iter(self.waiting))))


@dataclass(frozen=True)
class Member:
    """A job that waits."""

    job: "Job"
    config: "DictConfig"
    hydra_config: Any  # as it was when Hydra handed the job over
    # runs it to its end; returns the exit code, which its files have too
    run: Callable[["DictConfig", "Member"], int]


def common(config: "DictConfig") -> dict[str, Any]:
    """Return what all jobs of a group have in common; what cannot be resolved as it stands: the job
    will say so."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        values = OmegaConf.to_container(config, resolve=False)
    return {name: values.get(name) for name in COMMON}


def group_size(config: "DictConfig") -> int:
    """Return how many jobs like this one are to run together; what is wrong counts as one: the job
    will say so."""
    from omegaconf import OmegaConf

    asked = OmegaConf.select(config, "hardware.jobs_together", default=1)
    if asked == "auto":
        import torch

        device, engine = (
            OmegaConf.select(config, f"hardware.{key}") for key in ("device", "engine")
        )
        asked = (
            AUTO
            if torch.cuda.is_available() and device != "cpu" and engine in ("auto", "vectorised")
            else 1
        )
    return asked if isinstance(asked, int) and asked > 1 and not config.get("profile") else 1


def run_together(group: list[Member]) -> None:
    """Run the jobs of a group; one alone as any other job."""
    from fedexp.core import interrupts

    interrupts.release()
    if len(group) == 1:
        group[0].run(group[0].config, group[0])
        return
    from fedexp.training.lockstep import Lockstep

    lockstep = Lockstep()
    with held_gpu(common(group[0].config)["hardware"]) as device:
        jobs = [
            replace(
                each.job,
                lockstep=lockstep,
                place=replace(each.job.place, alone=False, device=device),
            )
            for each in group
        ]
        members = [replace(each, job=job) for each, job in zip(group, jobs, strict=True)]
        lockstep.run([partial(each.run, each.config, each) for each in members])


@contextmanager
def held_gpu(hardware: Mapping[str, Any]) -> Iterator[str | None]:
    """Hold a GPU for a whole group while the block runs, where there are some and the jobs take
    any; yield its name."""
    from fedexp.training import gpus

    names = gpus.visible() if hardware["device"] in ("auto", "cuda") else []
    if not names:
        yield None
        return
    with gpus.one_gpu(names, int(hardware["jobs_per_gpu"])) as number:
        yield f"cuda:{number}"
