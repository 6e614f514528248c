import io
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console

from fedexp.trackers.base import RoundRecord, RunInfo
from fedexp.trackers.progress import Progress, duration, result_table, write_line

SUMMARY = {
    "status": "completed",
    "algorithm": "fedntd",
    "dataset": "digits",
    "accuracy": 0.91234,
    "best_accuracy": 0.93,
    "forgetting": 0.2,
    "round_forgetting": None,
    "rounds_to_target": {"0.5": 7, "0.99": None},
    "rounds": 30,
    "seed": 3,
    "seconds": 3725.0,
    "train_samples_per_second": 12345.6,
    "hardware": {"device": "cpu", "engine": "sequential", "precision": "fp32"},
}


def make_info(total: int, first: int = 0) -> RunInfo:
    return RunInfo(
        Path("run"), {}, "digits_fedntd", None, "fedntd", (), total, first, ("a", "b"), None
    )


def make_record(
    number: int, accuracy: float | None = 0.5, seconds: float | None = 2.0
) -> RoundRecord:
    values = {
        "test_accuracy": accuracy,
        "forgetting": 0.1 if number else None,
        "train_loss": 1.5,
        "seconds": seconds,
    }
    return RoundRecord(number, values)


def terminal(width: int = 80) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        highlight=False,
        _environ={"TERM": "xterm"},
    )


def shown_on(console: Console) -> str:
    """Return the text of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", console.file.getvalue())


def plain_lines(records: Iterable[RoundRecord], total: int, first: int = 0) -> list[str]:
    console = Console(file=io.StringIO(), width=20)  # narrower than a line
    progress = Progress(console)
    progress.start(make_info(total, first))
    for record in records:
        progress.after_round(record)
    lines = console.file.getvalue().splitlines()
    progress.finish(SUMMARY, [], {})
    result = console.file.getvalue().splitlines()[len(lines) :]
    assert result[2].split() == ["status", "completed"]
    return lines


def plain_output(total: int, first: int = 0) -> list[str]:
    return plain_lines(map(make_record, range(first + (first > 0), total + 1)), total, first)


def test_plain_line_shows_metrics_and_time():
    lines = plain_output(12)
    assert len(lines) == 13
    # 10 rounds to go at 2 s each
    assert (
        lines[2]
        == "round  2/12  accuracy 0.5000  best 0.5000  forgetting 0.100  train loss 1.5  2 s/round "
        " left 20 s"
    )
    assert "forgetting" not in lines[0]
    assert lines[-1].endswith("2 s/round")  # nothing is left


def test_job_of_a_sweep_has_one_name():
    """The lines of jobs that share a terminal start with the name, and so does the result."""
    console = Console(file=io.StringIO())
    progress = Progress(console, shares_terminal=True, job="job 3")
    progress.start(make_info(1))
    progress.after_round(make_record(1))
    progress.finish(SUMMARY, [], {})
    line, result = console.file.getvalue().splitlines()
    assert line.startswith("job 3  round 1/1  accuracy 0.5000")
    assert result == "job 3: completed  accuracy 0.9123  forgetting 0.2000  time 1:02:05  run"


@pytest.mark.parametrize("total", [1, 2, 49, 50, 51, 99, 200, 1000, 4001])
def test_plain_output_has_at_most_52_lines(total):
    lines = plain_output(total)
    assert len(lines) <= 52
    assert lines[0].split()[1].startswith("0/")
    assert f"round {total}/{total} " in lines[-1]
    assert all("\x1b" not in line for line in lines)


def test_progress_of_a_resumed_run_starts_with_its_first_round():
    lines = plain_output(200, first=101)
    assert lines[0].startswith("round 102/200")
    assert lines[-1].startswith("round 200/200")


def test_line_is_written_at_once_through_a_pipe():
    pipe = io.BytesIO()
    stream = io.TextIOWrapper(pipe, encoding="utf-8")
    write_line("round 1/2", Console(file=stream))
    assert pipe.getvalue() == b"round 1/2\n"


def test_time_left_uses_recent_rounds():
    progress = Progress(Console(file=io.StringIO()))
    progress.start(make_info(100))
    assert progress.seconds_left is None
    progress.after_round(make_record(0, seconds=50.0))  # the initial model is not a round
    assert progress.seconds_left is None
    for number in range(1, 31):
        progress.after_round(make_record(number, seconds=100.0 if number <= 10 else 3.0))
    # only the last 20 rounds count
    assert progress.seconds_left == pytest.approx(70 * 3.0)


def test_line_of_a_round_that_was_not_evaluated_has_no_accuracy():
    lines = plain_lines(map(make_record, range(4), (0.9, 0.8, 0.6, None)), 3)
    assert "best" not in lines[0], "the initial model does not count as a result"
    assert "accuracy -  best 0.8000" in lines[-1]


def test_continual_learning_shows_average_accuracy():
    """It is undefined in round 0 and in rounds that are not evaluated."""
    values = [
        dict(make_record(number).values, average_accuracy=average)
        for number, average in enumerate((None, 0.31934, None))
    ]
    lines = plain_lines(map(RoundRecord, range(3), values), 2)
    assert [line.partition("  train loss")[0] for line in lines] == [
        "round 0/2  accuracy 0.5000",
        "round 1/2  accuracy 0.5000  average 0.3193  forgetting 0.100",
        "round 2/2  accuracy 0.5000  average -  forgetting 0.100",
    ]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("status", ["completed", "diverged"])
def test_live_display_fits_and_shows_the_status(width, status, monkeypatch):
    monkeypatch.setattr("fedexp.trackers.progress.result_table", lambda *_: None)
    console = terminal(width)
    progress = Progress(console)
    progress.start(make_info(200))
    for number in (0, 1, 113):
        progress.after_round(make_record(number))
    progress.finish({"status": status}, [], {})
    output = console.file.getvalue()
    frame = shown_on(console).splitlines()[-3:]
    assert frame[0].strip() == "digits_fedntd"
    assert frame[1].startswith("round 113/200 ")
    assert frame[1].rstrip().endswith(f"2 s/round  {status}")
    assert len(frame[1]) <= width
    assert frame[2].strip() == "accuracy 0.5000  best 0.5000  forgetting 0.100  train loss 1.5"
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor is shown again


def test_abort_restores_the_terminal():
    console = terminal()
    stdout = sys.stdout
    progress = Progress(console)
    progress.start(make_info(5))
    assert sys.stdout is not stdout
    progress.abort()
    assert sys.stdout is stdout
    assert "interrupted" in console.file.getvalue()
    assert "\x1b[?25h" in console.file.getvalue()


def test_result_is_printed_as_plain_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    console = Console(file=io.StringIO(), width=20)
    elsewhere = tmp_path.parent / "elsewhere" / "curves.png"
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").touch()
    result_table(SUMMARY, run, [elsewhere], console)
    output = console.file.getvalue()
    rows = {name.strip(): value for name, value in re.findall(r"(?m)^(\S.*?)  +(\S.*)$", output)}
    assert rows == {
        "algorithm": "fedntd",
        "dataset": "digits",
        "status": "completed",
        "rounds": "30",
        "seed": "3",
        "accuracy": "0.9123",
        "best accuracy": "0.9300",
        "forgetting": "0.2000",
        "round forgetting": "-",
        "rounds to target": "0.5: 7, 0.99: never",
        "time": "1:02:05",
        "samples/s": "12,346",
        "hardware": "device cpu, engine sequential, precision fp32",
    }
    assert output.splitlines()[-2:] == ["  run/summary.json", f"  {elsewhere}"]


def test_result_on_a_terminal_has_a_dash_for_each_missing_value(tmp_path):
    console = terminal()
    result_table({"status": "failed"}, tmp_path, [], console)
    assert "\x1b[31mfailed" in console.file.getvalue()  # in red
    rows = dict(re.findall(r"│ (\S.*?) +│ (\S+) ", shown_on(console)))
    assert rows["status"] == "failed"
    assert rows["hardware"] == rows["time"] == "-"


def test_result_shows_personal_and_task_metrics(tmp_path):
    console = Console(file=io.StringIO(), width=80)
    # after its first task
    tasks = {"average_accuracy": 0.31935, "new_task_accuracy": 0.958, "task_forgetting": None}
    own = {"personal_accuracy": 0.75, "personal_accuracy_std": 0.1, "personal_forgetting": 0.0625}
    result_table(SUMMARY | tasks | own, tmp_path, [], console)
    lines = console.file.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("personal accuracy"))
    assert lines[first - 1 : first + 5] == [
        "round forgetting     -",
        "personal accuracy    0.7500",
        "personal forgetting  0.0625",
        "average accuracy     0.3194",
        "new-task accuracy    0.9580",
        "task forgetting      -",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4217, "0.422 s"),
        (12.34, "12.3 s"),
        (60, "0:01:00"),
        (612.4, "0:10:12"),
        (90_000, "1 day, 1:00:00"),
    ],
)
def test_duration_is_formatted_with_its_unit(seconds, text):
    assert duration(seconds) == text
