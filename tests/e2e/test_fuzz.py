"""Random input: each command ends with a finished run, or with one message and exit code 2, and
leaves no files behind.

`make test-fuzz` runs 2,000 cases (`make test-fuzz CASES=20000`); the other tests run the first
ones.
"""

import json
import os
import shutil
import signal
import urllib.error
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fuzzing import IMAGES, NARROW, QUICK, TEXTS, Case, cases, source_files
from hypothesis import HealthCheck, Phase, given, seed, settings
from PIL import Image

# seconds of a case on the processor; ten times as many on the clock, since the machine may be busy
LIMIT = 60


class TooLong(BaseException):
    """Not an Exception, which fedexp would report as a failed run."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Small data sets: images of 32 x 32 in two classes, texts in three."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, n in (("train", 12), ("test", 4)):
        for name in ("cat", "dog"):
            (root / IMAGES / split / name).mkdir(parents=True)
            for i in range(n):
                picture = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
                picture.save(root / IMAGES / split / name / f"{i}.png")
    folder = root / TEXTS / "thucnews"
    folder.mkdir(parents=True)
    for split, n in (("train", 60), ("test", 12)):
        lines = [f"{'abcdefghij'[i % 7 : i % 7 + 4]} {i}\t{i % 3}" for i in range(n)]
        (folder / f"{split}.txt").write_text("\n".join(lines))
    return root


@pytest.fixture
def run_case(fedexp, data, tmp_path, monkeypatch) -> Iterator[Callable[[Case], str]]:
    """Return a function that runs a case in an empty directory and returns how it ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("WANDB_SILENT", "true")

    def reject(request, *args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", reject)
    before = {
        number: signal.signal(number, too_long) for number in (signal.SIGALRM, signal.SIGPROF)
    }

    def call(case: Case) -> str:
        directory = tmp_path / "case"
        shutil.rmtree(directory, ignore_errors=True)
        (tmp_path / "arguments.txt").write_text(repr(case))  # for a case that kills the process
        work = directory / "work"
        work.mkdir(parents=True)
        for name in (IMAGES, TEXTS):
            if any(name in argument for argument in case.arguments):
                shutil.copytree(data / name, work / name)
        for name, content in case.files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(content)
        os.chdir(work)
        there = snapshot(directory)
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        signal.alarm(10 * LIMIT)
        try:
            with warnings.catch_warnings():
                answer = fedexp(*case.arguments)
        finally:
            signal.alarm(0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.chdir(tmp_path)
        return judge(case, answer, directory, there)

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def too_long(number, frame):
    raise TooLong(f"more than {LIMIT} s")


def snapshot(directory: Path) -> dict[str, bytes | None]:
    """Return path -> content of every file, and None for every directory."""
    found = sorted(directory.rglob("*"))
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in found}


def judge(case, answer, directory: Path, there: dict) -> str:
    """Return how a case ended. Fails unless it ended as it should."""
    now = snapshot(directory)
    new = sorted(name for name in now if name not in there or now[name] != there[name])
    # decoded images, which the next run will want
    kept = [name for name in new if ".fedexp_cache" in name]
    new = [
        name
        for name in new
        if name not in kept and not any(each.startswith(f"{name}/") for each in kept)
    ]
    lost = sorted(there.keys() - now.keys())
    assert answer.code in (0, 2), f"exit code {answer.code}: {answer.err}"
    assert "Traceback" not in answer.err + answer.out, answer.err
    assert not lost, lost
    assert not [name for name in new if name.endswith((".tmp", ".owner.json"))], new
    multirun = any(a in ("--multirun", "-m", "hydra.mode=MULTIRUN") for a in case.arguments)
    if answer.code == 2:
        assert answer.err.count("fedexp:") == 1 or multirun, answer.err
        assert not new or multirun, f"left behind: {new}\n{answer.err}"
        return "rejected"
    runs = [name for name in new if name.endswith("summary.json")]
    if not runs:
        assert multirun or not [name for name in new if not name.startswith("work/run")], new
        return "nothing to run"
    for name in runs:
        summary = json.loads(now[name])
        assert summary["status"] in ("completed", "diverged"), summary
        assert str(Path(name).with_name("rounds.csv")) in now
    return "completed"


@pytest.fixture
def finished(fedexp, tmp_path) -> dict[str, bytes]:
    """The files of a finished run."""
    fedexp.done(*QUICK, *NARROW, "hydra.run.dir=finished")
    return source_files(tmp_path / "finished")


def campaign(number: int, start: int, run_case, finished) -> Counter:
    """Run random cases; fail with a report of all that ended badly."""
    outcomes, failures, seen = Counter(), [], set()

    @seed(start)
    @settings(
        max_examples=4 * number,  # many are drawn twice
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(finished))
    def try_one(case: Case) -> None:
        if repr(case) in seen or len(seen) == number:
            return
        seen.add(repr(case))
        try:
            outcomes[run_case(case)] += 1
        except (Exception, TooLong) as error:
            outcomes["failed"] += 1
            failures.append(
                f"{case.arguments}\n{without_run(case)}\n  {type(error).__name__}:"
                f" {str(error)[:3000]}"
            )

    try_one()
    report = f"seed {start}: {sum(outcomes.values())} cases: " + ", ".join(
        f"{v} {k}" for k, v in outcomes.items()
    )
    print(report)
    assert not failures, f"{report}\n" + "\n\n".join(failures)
    return outcomes


def without_run(case: Case) -> dict[str, bytes]:
    """Return the files of a case without those of a run, which are long."""
    return {
        name: content[:2000]
        for name, content in case.files.items()
        if name != "there.txt" and "run/" not in name
    }


@pytest.mark.slow
def test_random_commands_end_cleanly(run_case, finished):
    campaign(40, 1, run_case, finished)


@pytest.mark.skipif("FEDEXP_FUZZ_CASES" not in os.environ, reason="make test-fuzz")
@pytest.mark.timeout(0)
def test_many_random_commands_complete_or_are_rejected(run_case, finished):
    start = int(os.environ.get("FEDEXP_FUZZ_SEED", "2"))
    outcomes = campaign(int(os.environ["FEDEXP_FUZZ_CASES"]), start, run_case, finished)
    assert min(outcomes["completed"], outcomes["rejected"]) > 0.1 * sum(outcomes.values())
