"""The environment of a command: locale, limits, working directory, and early signals."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import SMALL, SOURCE, summary_of

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


# ---- locale and names


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


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
