"""Output that the console cannot show does not fail a run."""

import errno
import io
import logging
import sys
import threading
from contextlib import contextmanager

import pytest

from fedexp.core import console
from fedexp.training.run_log import EARLY_LINES, early_lines, run_log


class Broken(io.StringIO):
    """A closed terminal."""

    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")

    def flush(self):
        self.write("")


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(console, "problem", None)
    before = sys.stdout
    yield
    assert sys.stdout is before


@contextmanager
def printing_to(stream):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        with console.safe_streams():
            yield


def test_closed_terminal_is_noted_once(terminal):
    with printing_to(Broken()):
        print("lost", flush=True)
        print("lost too", flush=True)
    assert (
        console.problem
        == "the console cannot be written to (Input/output error); the run continues"
    )


def test_unencodable_letters_are_escaped(terminal):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    with printing_to(stream):
        print("é 数据", flush=True)
    assert raw.getvalue() == b"\xe9 \\u6570\\u636e\n"
    assert console.problem is None


def test_stream_that_the_program_has_closed_is_ignored(terminal):
    stream = io.TextIOWrapper(io.BytesIO())
    stream.close()
    with printing_to(stream):
        print("lost", flush=True)


def test_broken_pipe_is_ignored(terminal):
    def leave(*text):
        raise BrokenPipeError

    stream = io.StringIO()
    stream.write = leave
    with printing_to(stream):
        print("unread")
    assert console.problem is None


def test_missing_stdout_is_ignored(terminal):
    """As after `>&-`."""
    with printing_to(None):
        print("nowhere", flush=True)
        assert sys.stdout.write("abc") == 3
    assert console.problem is None


# --- run.log


def logged(directory):
    return [line.split(" ", 3)[-1] for line in (directory / "run.log").read_text().splitlines()]


@pytest.fixture
def log():
    logger = logging.getLogger("fedexp")
    logger.setLevel(logging.INFO)
    return logger


def test_run_log_starts_with_earlier_lines(tmp_path, log, terminal):
    """It has only lines of its run, not of an earlier run in the same process or of a run in
    another thread.
    """
    runs = [tmp_path / "first", tmp_path / "second"]
    for directory in runs:
        directory.mkdir()
        with early_lines() as early:
            others = threading.Thread(target=log.info, args=("of another thread",))
            others.start()
            others.join()
            log.info("%d parameters are frozen", 3)
            with run_log(directory, early):
                log.warning("hardware")
        log.info("after")
    with early_lines() as early, run_log(runs[0], early):  # it is resumed
        log.info("resuming")
    assert logged(runs[0]) == ["3 parameters are frozen", "hardware", "resuming"]
    assert logged(runs[1]) == ["3 parameters are frozen", "hardware"]
    assert not log.handlers


def test_earlier_lines_are_limited(tmp_path, log):
    with early_lines() as early:
        for number in range(EARLY_LINES + 5):
            log.info("%d", number)
        with run_log(tmp_path, early):
            log.info("opened")
    assert logged(tmp_path) == [*map(str, range(EARLY_LINES)), "opened"]
