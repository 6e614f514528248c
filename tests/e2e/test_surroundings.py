"""The environment of a command: locale, limits, working directory, and early signals."""

import os
import pty
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import SMALL, SOURCE, summary_of, write_images

from fedexp.core import errors, interrupts


def command(*arguments: str, environment=None, **options) -> subprocess.Popen:
    clean = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(SOURCE),
    }
    program = [
        sys.executable,
        "-c",
        "import sys; from fedexp.cli.main import main; sys.exit(main())",
        *arguments,
    ]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(program, env=clean | (environment or {}), **(both | options))


# ---- signals


def test_signal_during_imports_is_raised_after_them():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # the tests may have been started under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for number in before:
            interrupts.hold()
            os.kill(os.getpid(), number)  # nothing yet
            with pytest.raises(KeyboardInterrupt):
                interrupts.release()
            interrupts.release()  # it is told once
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
        interrupts.hold()
        os.kill(os.getpid(), signal.SIGINT)
        interrupts.release()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
def test_signal_while_torch_is_imported_stops_the_run(tmp_path):
    """A module sends the signal and swallows exceptions, as some libraries do."""
    text = (
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\n    sum(range(1000))\n"
    )
    (tmp_path / "tracemalloc.py").write_text(text + "except BaseException:\n    pass\n")
    program = "import sys, fedexp.cli.job as t; old = t.run_job\n"
    program += (
        "def job(config):\n    sys.path.insert(0, '.'); sys.modules.pop('tracemalloc', None)\n"
    )
    program += "    import tracemalloc\n    return old(config)\n"
    program += "t.run_job = job\nfrom fedexp.cli.main import main; sys.exit(main())"
    clean = os.environ | {"PYTHONPATH": str(SOURCE)}
    arguments = ["rounds=1000", *SMALL, "tracker=none"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 130, done.stderr
    assert "There is nothing to resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("rounds.csv"))


# ---- locale and names


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.slow
def test_locale_without_utf_8_is_replaced(tmp_path):
    (tmp_path / "ü").mkdir()
    # rejected before torch is imported
    process = command("resume=ü", environment=ASCII, cwd=tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said.decode().startswith("fedexp: resume=ü: not a run directory (")


def test_name_that_is_not_utf_8_is_rejected(fedexp):
    answer = fedexp.rejected("hydra.run.dir='\udcff'")
    assert "is not valid UTF-8" in answer.err


@pytest.mark.slow  # a real process
def test_run_works_in_directories_with_non_ascii_names(tmp_path):
    """The console and the locale cannot show the letters, but the run's files have them."""
    write_images(tmp_path / "ü", 20, 20)
    environment = ASCII | {"PYTHONIOENCODING": "latin-1"}
    options = [option for option in SMALL if not option.startswith("min_size")]
    options += ["dataset=image_folder", "dataset.root='ü'", "partition=iid"]
    options += ["rounds=1", "hydra.run.dir='ü/结果'", "tracker=none"]
    process = command(*options, environment=environment, cwd=tmp_path)
    said = process.communicate(timeout=120)[0].decode("latin-1")
    assert process.returncode == 0, said
    assert "\\u7ed3\\u679c" in said
    check_completed(
        tmp_path / "ü/结果", "the console cannot be written to ('latin-1' codec can't encode"
    )


def check_completed(run: Path, noted: str) -> None:
    """Assert that the run is complete and that its log says once why the console failed."""
    assert summary_of(run)["status"] == "completed"
    assert (run / "rounds.csv").read_text().splitlines()[-1].startswith("1,")
    assert (run / "run.log").read_text(encoding="utf-8").count(noted) == 1


# ---- the console


@pytest.mark.slow  # a real process
@pytest.mark.parametrize("both", [False, True])
def test_run_succeeds_if_the_console_cannot_be_written(tmp_path, both):
    """The output goes to /dev/full."""
    with open("/dev/full", "w") as full:
        options = {"stdout": full, "stderr": full if both else subprocess.PIPE}
        process = command(
            "rounds=1", *SMALL, "tracker=none", "hydra.run.dir=run", cwd=tmp_path, **options
        )
        said = (process.communicate(timeout=120)[1] or b"").decode()
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert "Exception ignored" not in said  # what the interpreter says where its last flush fails
    check_completed(tmp_path / "run", "the console cannot be written to (No space left on device)")


@pytest.mark.slow  # a real process
def test_closed_terminal_does_not_stop_the_run(tmp_path):
    """As under nohup, SIGHUP is ignored, and then every printed line is an input/output error."""
    leader, terminal = pty.openpty()

    def begin():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.login_tty(terminal)

    arguments = ("rounds=1", *SMALL, "tracker=none", "hydra.run.dir=run")
    process = command(*arguments, cwd=tmp_path, preexec_fn=begin, stdout=None, stderr=None)
    os.close(terminal)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/config.yaml").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        if select.select([leader], [], [], 0.02)[0]:
            os.read(leader, 4096)
    os.close(leader)
    assert process.wait(timeout=120) == 0
    check_completed(tmp_path / "run", "the console cannot be written to (Input/output error)")


# ---- files among the images that are not images


@pytest.mark.timeout(60)
def test_file_that_is_not_an_image_is_one_message(fedexp, tmp_path):
    """Reading a pipe would block. tests/test_damaged_data.py has links."""
    write_images(tmp_path / "images", 2, 2)
    os.mkfifo(tmp_path / "images/train/a/9.png")
    answer = fedexp.rejected("dataset=image_folder", "dataset.root=images", "partition=iid")
    assert "images/train/a/9.png: " in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


# ---- limits of memory


@pytest.mark.slow
def test_lack_of_memory_for_torch_is_one_message(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (1_500_000_000,) * 2)

    process = command(
        "rounds=1",
        *SMALL,
        environment={"OPENBLAS_NUM_THREADS": "1"},
        cwd=tmp_path,
        preexec_fn=limit,
    )
    said = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 1, said
    assert said.startswith("fedexp: out of memory (")
    assert len(said.splitlines()) == 1


def test_lack_of_memory_for_data_is_one_message(fedexp, monkeypatch):
    def load(*arguments):
        raise MemoryError("Unable to allocate 9 TiB for an array")

    monkeypatch.setattr("fedexp.training.run.prepare", load)
    answer = fedexp("rounds=1", *SMALL, "hydra.run.dir=new/run")
    assert answer.code == 1
    assert "Traceback" not in answer.err
    assert (
        "fedexp: the run failed: MemoryError: Unable to allocate 9 TiB for an array" in answer.err
    )


def test_an_option_that_fails_after_the_start_is_reported_without_the_exception(
    fedexp, monkeypatch
):
    def play(*arguments):
        raise errors.ConfigError("algorithm.samples=9: too many")

    monkeypatch.setattr("fedexp.training.run.run_rounds", play)
    answer = fedexp("rounds=1", *SMALL, "hydra.run.dir=new/run")
    assert answer.code == 1
    assert "fedexp: the run failed: algorithm.samples=9: too many\n" in answer.err


def test_errors_of_exhausted_memory_are_recognised():
    found = [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ]
    found += [ImportError("libx.so: failed to map segment from shared object")]
    assert all(errors.lacks_memory(error) for error in found)
    assert not any(
        errors.lacks_memory(error)
        for error in (OSError(2, "x"), ValueError("allocate memory"), ImportError())
    )


# ---- modules in the current directory


@pytest.mark.slow  # three processes import torch
def test_launcher_does_not_import_from_the_working_directory(tmp_path):
    """In a separate process, because pytest has the working directory on its path."""
    (tmp_path / "random.py").write_text("import os; os.mkdir('stolen'); raise SystemExit(1)")
    options = [
        "--multirun",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "seed=1,2",
        "rounds=1",
        *SMALL,
    ]
    program = [sys.executable, "-P", "-m", "fedexp", *options]  # -P: as the console script
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    environment.pop("PYTHONSAFEPATH", None)
    answer = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert not (tmp_path / "stolen").exists()


def test_subprocess_does_not_import_from_the_working_directory(tmp_path):
    """In a separate process, because pytest has the working directory on its path."""
    (tmp_path / "random.py").write_text("import os; os.mkdir('stolen'); raise SystemExit(1)")
    program = (
        "import subprocess, sys; from fedexp.cli.main import set_up_process; set_up_process()\n"
    )
    program += "sys.exit(subprocess.call([sys.executable, '-c', 'import random']) != 0)"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)}
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, capture_output=True
    )
    assert answer.returncode == 0, answer.stderr
    assert not (tmp_path / "stolen").exists()
