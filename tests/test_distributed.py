"""The parts of the distributed engine that need no second process; whole runs stand in
e2e/test_torchrun.py."""

import io
from dataclasses import dataclass

import pytest
import torch
import yaml

from fedexp.core.errors import ConfigError
from fedexp.engine.hardware import Hardware
from fedexp.engine.processes import channel
from fedexp.engine.processes.distributed import attempt, packed
from fedexp.engine.processes.ranks import Ranks, find_ranks
from fedexp.engine.processes.worker import Failure
from toy_federation import CONF

MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
TORCHRUN = MASTER | {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = MASTER | {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (TORCHRUN, Ranks(3, 8, 1)),
        (SLURM, Ranks(2, 4, 0)),
        (SLURM | TORCHRUN, Ranks(3, 8, 1)),  # torchrun inside a Slurm job
        ({}, None),
        (MASTER, None),
        # independent runs of one Slurm job
        ({k: v for k, v in SLURM.items() if k != "MASTER_ADDR"}, None),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, None),
        (TORCHRUN | {"RANK": "first"}, None),
    ],
)
def test_ranks_are_found_in_the_environment(environment, found):
    assert find_ranks(environment) == found


def hardware(**changes):
    values = yaml.safe_load((CONF / "hardware/auto.yaml").read_text())
    del values["_target_"]
    return Hardware(**values | {"device": "cpu"} | changes)


def test_several_processes_mean_the_distributed_engine(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for engine in ("auto", "distributed"):
        chosen = hardware(engine=engine).resolve(vectorises=True, cohort_size=4)
        assert (chosen.engine, chosen.inner, chosen.workers, chosen.threads) == (
            "distributed",
            "sequential",
            8,
            1,
        )
    for engine in ("sequential", "workers", "vectorised"):
        with pytest.raises(
            ConfigError, match=f"hardware.engine={engine}: 8 processes were started"
        ):
            hardware(engine=engine).resolve(vectorises=True, cohort_size=4)
    with pytest.raises(ConfigError, match=r"hardware\.workers=3: 8 processes were started"):
        hardware(engine="auto", workers=3).resolve(vectorises=True, cohort_size=4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (
        hardware(engine="sequential").resolve(vectorises=True, cohort_size=4).engine == "sequential"
    )


@dataclass(frozen=True)
class Mixed:
    """A value as the engine sends it: tensors among other things."""

    name: str
    tensors: dict[str, torch.Tensor]
    module: torch.nn.Module


def test_a_packet_keeps_values_types_and_layout():
    tensors = {
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "odd": torch.arange(7, dtype=torch.uint8)[1:6:2],
        "half": torch.randn(3).to(torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "grad": torch.ones(2, dtype=torch.float64, requires_grad=True),
    }
    sent = Mixed("x", tensors, torch.nn.Conv2d(1, 2, 3))
    came = channel.load(io.BytesIO(packed(sent).numpy()))
    for name, tensor in tensors.items():
        torch.testing.assert_close(came.tensors[name], tensor.detach(), rtol=0, atol=0)
        assert not came.tensors[name].requires_grad
    assert came.name == "x"
    assert came.tensors["last"].stride() == tensors["last"].stride()
    for key, value in sent.module.state_dict().items():
        assert torch.equal(came.module.state_dict()[key], value)
    assert isinstance(came.module.weight, torch.nn.Parameter)


def test_what_goes_wrong_is_an_answer_too():
    failure = attempt(lambda: 1 / 0)
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, ZeroDivisionError)
    assert "1 / 0" in failure.report
    assert attempt(max, 1, 2) == 2
