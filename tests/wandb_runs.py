"""A fake wandb that records its calls, and functions that read W&B runs. No network is used."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import wandb
from omegaconf import OmegaConf

from fedexp.trackers.base import RunInfo
from fedexp.trackers.wandb_tracker import Wandb

CONF = Path(__file__).parents[1] / "conf" / "tracker"
CLASSES = ("cat", "dog", "bird")
CLOCK = ("_runtime", "_timestamp", "_wandb")  # in rows and summaries


@pytest.fixture(autouse=True)
def clean_home(tmp_path_factory):
    """Use an empty home without a key or settings."""
    home = str(tmp_path_factory.mktemp("home"))
    fonts = os.environ.get("MPLCONFIGDIR", os.path.expanduser("~/.cache/matplotlib"))
    with patch.dict(os.environ, HOME=home, NETRC=f"{home}/netrc", MPLCONFIGDIR=fonts):
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            del os.environ[name]
        yield


class FakeRun:
    """A W&B run that records its calls."""

    def __init__(self, **asked):
        self.asked, self.logged, self.metrics = asked, [], {}
        self.summary: dict[str, Any] = {}
        self.code: int | None = None
        self.offline = asked["mode"] == "offline"
        prefix = "offline-run" if self.offline else "run"
        self.step = 0  # of the next row; greater if the server has rows
        self.dir = str(Path(asked["dir"]) / "wandb" / f"{prefix}-20261125-{asked['id']}" / "files")
        Path(self.dir).mkdir(parents=True)
        Path(self.dir).with_name(f"run-{asked['id']}.wandb").touch()

    def log(self, row, step=None, commit=None):
        self.logged.append((step, row))

    def define_metric(self, name, **kind):
        self.metrics[name] = kind

    def finish(self, code):
        self.code = code

    def rows(self) -> list[dict[str, Any]]:
        return [row for _, row in self.logged]


@pytest.fixture(name="fake_wandb")
def make_fake_wandb(monkeypatch):
    """Replace wandb by a fake with a key and a server that answers. `runs` has its runs."""
    settings = SimpleNamespace(mode="online", api_key="key", base_url="https://api.wandb.ai")
    fake = SimpleNamespace(settings=settings, runs=[], step=0)

    def init(**asked):
        fake.runs.append(FakeRun(**asked))
        fake.runs[-1].step = fake.step
        return fake.runs[-1]

    monkeypatch.setattr("wandb.setup", lambda settings: fake)
    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr("wandb.teardown", lambda: None)
    return fake


def make_config(**changes) -> Wandb:
    values = OmegaConf.to_container(OmegaConf.load(CONF / "wandb.yaml"))
    values.pop("_target_")
    return Wandb(**values | {"tags": (), "init_timeout": 20.0, "finish_timeout": 20.0} | changes)


def make_info(directory: Path, **changes) -> RunInfo:
    info = RunInfo(
        directory=directory,
        config={
            "algorithm": {"name": "fedntd", "tau": 1.0},
            "alpha": 0.1,
            "targets": [0.5],
            "resume": None,
        },
        name="digits_fedntd",
        group="sweep",
        job_type="fedntd",
        tags=("digits", "lda"),
        total_rounds=3,
        first_round=0,
        classes=CLASSES,
    )
    return replace(info, **changes)


def run_folders(directory: Path) -> list[Path]:
    return sorted((directory / "wandb").glob("*run-*"))


def inspect(folder: Path, *options: str) -> str:
    """Return what `wandb leet inspect` prints for a run folder."""
    from wandb.util import get_core_path

    (file,) = folder.glob("*.wandb")
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", *options]
    answer = subprocess.run(
        [*command, "--run-file", str(file), str(folder.parent)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unknown" in answer.stderr.lower() or "not defined" in answer.stderr:
        pytest.skip(f"wandb {wandb.__version__} has no `wandb leet inspect --json`")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the summary, the history rows (nested keys joined by dots), and all records."""
    records = [json.loads(line) for line in inspect(folder).splitlines()]
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    return json.loads(inspect(folder, "--summary")), history, records


def content(folder: Path) -> dict[str, Any]:
    """Return the content of a run that does not depend on the clock, with images and tables as
    bytes.
    """
    run, history, records = read_run(folder)
    (record,) = [r["run"] for r in records if r["type"] == "run"]
    defined = [r["metric"] for r in records if r["type"] == "metric"]
    seen = {
        key: run[key]
        for key in ("name", "project", "entity", "tags", "config", "state", "exit_code")
    }
    seen |= {"group": record["run_group"], "job_type": record["job_type"], "metrics": defined}
    seen |= {
        "history": [without_clock(row) for row in history],
        "summary": without_clock(run["summary"]),
    }
    files = (path for path in (folder / "files" / "media").rglob("*") if path.is_file())
    return seen | {"files": {str(path.relative_to(folder)): path.read_bytes() for path in files}}


def without_clock(row: dict[str, Any]) -> dict[str, Any]:
    """Remove values that depend on the clock, and the random names of artifacts."""
    kept = {
        key: value
        for key, value in row.items()
        if not key.startswith(CLOCK) and "artifact_path" not in key
    }
    return {
        key: without_clock(value) if isinstance(value, dict) else value
        for key, value in kept.items()
    }
