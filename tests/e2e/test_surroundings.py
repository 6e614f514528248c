"""What surrounds a command: its locale, its limits, its current directory, and a signal before it has begun."""

import os
import resource
import signal
import subprocess
import sys

import pytest
from helpers import SMALL, SOURCE

from fedexp.core import errors, interrupts


def command(*arguments: str, environment=None, **options) -> subprocess.Popen:
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(SOURCE)}
    program = [sys.executable, "-c", "import sys; from fedexp.cli.main import main; sys.exit(main())", *arguments]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(program, env=clean | (environment or {}), **both, **options)


# ---- signals


def test_a_signal_during_imports_is_noted_and_raised_after_them():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
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


def test_a_process_that_never_held_signals_keeps_its_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    interrupts.release()
    assert before == {number: signal.getsignal(number) for number in before}


def test_a_signal_while_torch_is_imported_stops_the_run_cleanly(tmp_path):
    """A module sends the signal while it is imported, and swallows exceptions as some libraries do."""
    text = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\n    sum(range(1000))\n"
    (tmp_path / "tracemalloc.py").write_text(text + "except BaseException:\n    pass\n")
    program = "import sys, fedexp.cli.job as t; old = t.run_job\n"
    program += "def job(config):\n    sys.path.insert(0, '.'); sys.modules.pop('tracemalloc', None)\n"
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
    assert "Interrupted before the first evaluation" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("rounds.csv"))


# ---- locale and names


def test_a_locale_without_utf_8_is_given_one(tmp_path):
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "ü").mkdir()
    process = command("resume=ü", environment=environment, cwd=tmp_path)  # refused before torch is imported
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said.decode().startswith("fedexp: resume=ü: not a run directory (")


def test_a_name_that_is_no_text_is_refused(fedexp):
    answer = fedexp("hydra.run.dir='\udcff'")
    assert answer.code == 2
    assert "is not UTF-8 text" in answer.err


# ---- limits of memory


def test_without_memory_for_torch_there_is_one_message(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (1_500_000_000,) * 2)

    process = command("rounds=1", *SMALL, environment={"OPENBLAS_NUM_THREADS": "1"}, cwd=tmp_path, preexec_fn=limit)
    said = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 1, said
    assert said.startswith("fedexp: the system gives no more memory (")
    assert len(said.splitlines()) == 1


def test_without_memory_for_the_data_there_is_one_message(fedexp, monkeypatch):
    def load(*arguments):
        raise MemoryError("Unable to allocate 9 TiB for an array")

    monkeypatch.setattr("fedexp.training.job.prepare", load)
    answer = fedexp("rounds=1", *SMALL, "hydra.run.dir=new/run")
    assert answer.code == 1
    assert "Traceback" not in answer.err
    assert "fedexp: the run failed: MemoryError: Unable to allocate 9 TiB for an array" in answer.err


def test_what_counts_as_lack_of_memory():
    found = [MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("can't start new thread")]
    found += [ImportError("libx.so: failed to map segment from shared object")]
    assert all(errors.lacks_memory(error) for error in found)
    assert not any(
        errors.lacks_memory(error) for error in (OSError(2, "x"), ValueError("allocate memory"), ImportError())
    )


# ---- modules in the current directory


def test_what_it_starts_does_not_import_from_the_current_directory(tmp_path):
    """In a process of its own: that of the tests has the current directory on its path, and would hand it on."""
    (tmp_path / "random.py").write_text("import os; os.mkdir('stolen'); raise SystemExit(1)")
    program = "import subprocess, sys; from fedexp.cli.main import set_up_process; set_up_process()\n"
    program += "sys.exit(subprocess.call([sys.executable, '-c', 'import random']) != 0)"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)}
    answer = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, capture_output=True)
    assert answer.returncode == 0, answer.stderr
    assert not (tmp_path / "stolen").exists()


@pytest.mark.slow  # three processes import torch
def test_processes_of_a_launcher_do_not_import_from_the_current_directory(tmp_path):
    """In a process of its own: that of the tests has the current directory on its path, and would hand it on."""
    (tmp_path / "random.py").write_text("import os; os.mkdir('stolen'); raise SystemExit(1)")
    options = ["--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2", "rounds=1", *SMALL]
    program = [sys.executable, "-P", "-m", "fedexp", *options]  # -P: as the console script
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    environment.pop("PYTHONSAFEPATH", None)
    answer = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert not (tmp_path / "stolen").exists()
