"""Attacks with optional files of a run directory: pipes that block, packed bytes that expand to
more than the memory, and links to the reader's files."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedexp.cli import preview
from fedexp.cli.commands import call
from fedexp.cli.job import has_result
from fedexp.cli.sweeps import NOTES, collect_exit_codes
from fedexp.config.values import resolve
from fedexp.core import storage
from fedexp.core.errors import FAILED, ConfigError
from fedexp.core.npz import load_npz
from fedexp.core.storage import regular
from fedexp.data.partitioned import partition_hash
from fedexp.figures.load import load_history
from fedexp.rundir import lock, origin
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import sweep_name
from test_damaged_runs import write_job
from toy_federation import composed

pytestmark = pytest.mark.timeout(60)
OPTIONAL = (
    "error.txt",
    "partition.npz",
    "partition_task2.npz",
    "local_class_accuracy.npz",
    "fingerprint.json",
)
OPTIONAL = (
    *OPTIONAL,
    "elsewhere.json",
    ".lock",
    ".owner.json",
    "run.log",
    "clients.csv",
    "tasks.csv",
)


@pytest.fixture
def sweep(here) -> Path:
    """A sweep with a valid job and a job with pipes beside its tables."""
    folder = here / "multirun" / "theirs"
    for seed, name in enumerate(("sound", "hurt")):
        write_job(folder / name, seed)
    for name in OPTIONAL:
        (folder / "hurt" / name).unlink(missing_ok=True)
        os.mkfifo(folder / "hurt" / name)
    os.mkfifo(folder / "sweep.json")
    return folder


@pytest.mark.parametrize("command", ["report", "figures", "preview"])
def test_no_command_waits_for_a_pipe(sweep, command, capsys):
    hurt = sweep / "hurt"
    match command:
        case "report":
            assert call("report", [str(sweep), "--out", str(sweep / "all")]) == 0
        case "figures":
            assert call("figures", [str(hurt)]) == 2
            assert "partition.npz: " in capsys.readouterr().err
        case "preview":
            planned = [preview.Planned(hurt, resolve(composed()))]
            preview.show_jobs(planned)


def test_no_reader_waits_for_a_pipe(sweep, tmp_path):
    run = RunDirectory(sweep / "hurt")
    names = [
        name
        for name, value in vars(RunDirectory).items()
        if isinstance(value, property) or hasattr(value, "func")
    ]
    assert {"summary", "tasks", "clients", "class_names"} <= {*names}
    for name in names:
        getattr(run, name)
    assert {"partition.npz", "clients.csv", "tasks.csv"} <= run.unreadable.keys()
    assert sweep_name(sweep) == "theirs"
    assert lock.owner_of(sweep / "hurt") == "another process"
    assert origin.read(sweep / "hurt") == {}
    (sweep / NOTES).mkdir()
    os.mkfifo(sweep / NOTES / "1.json")
    assert collect_exit_codes(sweep, "") == [FAILED]
    with pytest.raises(ConfigError, match="cannot be read"):
        load_history(RunDirectory(sweep / "hurt"))
    for name in ("summary.json", "class_accuracy.csv"):
        (sweep / "sound" / name).unlink()
        os.mkfifo(sweep / "sound" / name)
    assert has_result(sweep / "sound")  # whatever it is, no rejected job writes over it
    with pytest.raises(ConfigError, match="is not a file"):
        load_history(RunDirectory(sweep / "sound"))


def test_only_regular_files_are_accepted(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert regular(tmp_path / "link").read_text() == "x"
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(OSError, match=str(path)):
            regular(path)


def test_zip_bomb_is_rejected(tmp_path):
    """128 MB of zeros are packed to a thousandth."""
    path = tmp_path / "partition.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed,
        packed.open("counts.npy", "w") as file,
    ):
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (2**27,)}
        )
        for _ in range(2**7):
            file.write(bytes(2**20))
    assert path.stat().st_size < 2**19
    with pytest.raises(ConfigError, match=r"partition\.npz: cannot be read .* expand to 134,"):
        load_npz(path)


def npy(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of an array without its values."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": kind, "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def test_array_of_elements_without_size_is_rejected(tmp_path):
    """200 bytes have 10^9 class names."""
    with zipfile.ZipFile(tmp_path / "partition.npz", "w") as packed:
        packed.writestr("classes.npy", npy("|S0", (10**9,)))
    with pytest.raises(ConfigError, match="classes has elements of zero bytes"):
        load_npz(tmp_path / "partition.npz")


@pytest.mark.parametrize(
    ("name", "columns", "row"),
    [
        ("tasks.csv", "round,task,evaluated_task,accuracy", "{i},1,60000,0.5"),
        ("class_accuracy.csv", "round,class,accuracy", "{i},59999,0.5"),
        ("class_accuracy.csv", "round,class,accuracy", "1,999999999,{i}"),
        (
            "gradient_diversity.csv",
            "round,layer,clients,gradient_diversity,weighted_gradient_diversity",
            "{i},layer{i},1,1,1",
        ),
    ],
)
def test_table_whose_matrix_would_be_too_large_is_rejected(tmp_path, name, columns, row):
    """60,000 rounds and as many classes, tasks or layers are a matrix of 29 GB."""
    rows = [columns, *(row.format(i=i) for i in range(60_000))]
    (tmp_path / name).write_text("\n".join(rows) + "\n")
    run = RunDirectory(tmp_path)
    assert (run.tasks, run.class_accuracy(), run.analysis("gradient_diversity.csv")) == (None,) * 3
    assert (
        f"{name}: has 60000 rows, but the matrix of its values would be too large"
        in run.describe_damage()
    )


def test_history_with_too_many_classes_is_rejected(tmp_path):
    """Two files of 72 kB have 1,000 rounds of 8,000,000 classes (64 GB)."""
    arrays = {"indices": np.arange(1), "sizes": np.array([1]), "info": np.array("{}")}
    arrays["hash"] = np.array(partition_hash([arrays["indices"]]))
    arrays["counts"] = np.zeros((1, 8_000_000), np.int64)
    np.savez_compressed(tmp_path / "partition.npz", **arrays)
    rows = ["round,class,accuracy", *(f"{i},0,0.5" for i in range(1000)), ""]
    (tmp_path / "class_accuracy.csv").write_text("\n".join(rows))
    with pytest.raises(ConfigError, match=r"class_accuracy\.csv: .* expand to 64,000,000,000"):
        load_history(RunDirectory(tmp_path))


def test_local_models_of_an_invalid_round_are_rejected(tmp_path):
    """Figures have one point per round up to the last one."""
    arrays = {"indices": np.arange(1), "sizes": np.array([1]), "info": np.array("{}")}
    arrays["hash"] = np.array(partition_hash([arrays["indices"]]))
    np.savez(tmp_path / "partition.npz", counts=np.ones((1, 1), np.int64), **arrays)
    (tmp_path / "class_accuracy.csv").write_text("round,class,accuracy\n0,0,0.5\n")
    local = {"sampled": np.zeros((1, 1), np.int64), "accuracy": np.ones((1, 1, 1))}
    np.savez(tmp_path / "local_class_accuracy.npz", rounds=np.array([0]), **local)
    assert load_history(RunDirectory(tmp_path)).local_rounds == [0]
    for odd in (10**12, np.inf, "x"):
        np.savez(tmp_path / "local_class_accuracy.npz", rounds=np.array([odd]), **local)
        with pytest.raises(ConfigError, match=r"npz: the file contains invalid round numbers"):
            load_history(RunDirectory(tmp_path))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1).expand(10**12), "4 bytes would expand to 4,000,000,000,000"),
        (torch.empty(10**12, device="meta"), "a tensor is sparse or has no values"),
        (torch.eye(2).to_sparse(), "a tensor is sparse or has no values"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensor_larger_than_its_storage_is_rejected(tmp_path, value, message):
    torch.save({"server": {"a": torch.zeros(3).expand(2, 3)}}, tmp_path / "x.pt")
    assert storage.load_tree(tmp_path / "x.pt")["server"]["a"].shape == (2, 3)
    torch.save({"server": {"a": value}}, tmp_path / "x.pt")
    for mapped in (False, True):
        with pytest.raises(ConfigError, match=message):
            storage.load_tree(tmp_path / "x.pt", mapped)


def test_compressed_checkpoint_is_rejected(tmp_path):
    """torch does not compress; zeros would be packed to a thousandth."""
    torch.save({"a": torch.zeros(100_000)}, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as archive,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    with pytest.raises(ConfigError, match="its records are compressed"):
        storage.load_tree(tmp_path / "packed.pt")


def test_compressed_arrays_are_read(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", counts=np.zeros((1000, 1000)))
    assert load_npz(tmp_path / "x.npz")["counts"].shape == (1000, 1000)
