"""The place of a job: where a launcher has put it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Facts that a job knows about where its launcher has put it."""

    cores: int | None = None  # that it may use; None: all that its process may
    finds_gpu: bool = False  # no scheduler has given it one: the jobs of this machine share them out (see gpus.py)
    alone: bool = True  # no other job writes to the same terminal at the same time
