"""Weights & Biases as a view of a run: it can fail or hang without stopping, blocking or corrupting
the run.

Every call of wandb's runs in a thread that is waited for only so long; after the first failure the
tracker warns once and keeps quiet. What W&B writes stays under `<run directory>/wandb`.
"""

import contextlib
import io
import logging
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core.errors import require, require_choice
from fedexp.core.views import PLAIN
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker, TrackerConfig, display_path
from fedexp.trackers.wandb_names import (
    analysis_metric,
    class_metric,
    define_metrics,
    flat_summary,
    metric_name,
)
from fedexp.trackers.wandb_service import bounded, end_service, logged_in, set_environment

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedexp")

MODES = ("auto", "online", "offline", "disabled")
# what needs no server takes milliseconds to a few seconds; longer means that wandb hangs
LOCAL_SECONDS = 30.0
GRACE_SECONDS = 5.0  # wandb's own timeouts come first, so that it can clean up
TAG_LENGTH = 64  # W&B's limit; of groups and names it is 128
# of W&B in a round: after each there is room for results, should the run be given more rounds
STEPS = 10
# rounds between images where they are a part of all rounds: short runs are not held up by them
LEAST_INTERVAL = 10


@dataclass(frozen=True, kw_only=True)
class Wandb(TrackerConfig):
    """Configuration of `tracker=wandb`."""

    project: str
    entity: str | None
    mode: str  # auto | online | offline | disabled
    group: str | None
    job_type: str | None
    tags: tuple[str, ...]
    name: str | None
    log_images_every: float  # rounds; below 1: part of all rounds; 0: only at the end
    init_timeout: float  # seconds
    finish_timeout: float  # seconds

    def __post_init__(self) -> None:
        require(bool(self.project), "tracker.project", repr(self.project), "a name")
        require_choice("tracker.mode", self.mode, MODES)
        every = self.log_images_every
        whole = every < 1 or float(every).is_integer()
        require(
            every >= 0 and whole,
            "tracker.log_images_every",
            every,
            "a number of rounds, or a part of them from 0 to 1",
        )
        require(self.init_timeout > 0, "tracker.init_timeout", self.init_timeout, "greater than 0")
        require(
            self.finish_timeout > 0, "tracker.finish_timeout", self.finish_timeout, "greater than 0"
        )

    def image_interval(self, rounds: int) -> int | None:
        """Return the rounds between images in a run of so many; None: none before the end."""
        every = self.log_images_every
        if 0 < every < 1:
            return max(round(every * rounds), LEAST_INTERVAL)
        return int(every) or None

    def create(self) -> Tracker:
        return Tracker() if self.mode == "disabled" else WandbTracker(self)


class WandbTracker(Tracker):
    """One W&B run for each call of `start`; silent, without prompts, and closed by `finish` or
    `abort`."""

    def __init__(self, config: Wandb) -> None:
        self.config = config
        self._run: Any = None  # None: not started, switched off, failed or closed
        self._id: str | None = None
        self._offline = False
        self.complete = False  # whether the whole run is with W&B, or in the files for `wandb sync`
        self._restore_environment: Callable[[], None] | None = None  # None: nothing is open

    @property
    def run_id(self) -> str | None:
        return self._id

    def start(self, info: RunInfo) -> None:
        folder = info.directory.absolute() / "wandb"
        self._info, self._last_round = info, info.first_round
        self._id = info.wandb_id or _new_id()
        self._older = {path.name for path in folder.glob("run-*")}
        self._restore_environment = set_environment(folder)
        try:
            self._connect()
        except Exception as error:
            log.warning("W&B cannot start; the run goes on without it (%s)", _reason(error))
        if self._run is None:
            self._end(GRACE_SECONDS)

    def log_round(self, record: RoundRecord) -> None:
        self._last_round = record.round
        self._guard("log a round", lambda: self._log_round(record), LOCAL_SECONDS)

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: Mapping[str, "pd.DataFrame"]
    ) -> None:
        self._guard(
            "log the results", lambda: self._log_results(summary, figures, tables), LOCAL_SECONDS
        )
        self._close(exit_code=0)

    def abort(self) -> None:
        self._close(exit_code=1)

    def _connect(self) -> None:
        """Open the W&B run, online if that is asked for and possible, else offline."""
        modes = bounded(self._modes, LOCAL_SECONDS)
        if "online" in modes:
            try:
                self._run = bounded(
                    lambda: self._init("online"), self.config.init_timeout + GRACE_SECONDS
                )
                return
            except Exception as error:
                log.warning("W&B cannot be reached; the run goes on offline (%s)", _reason(error))
                self._discard_attempt()
        if "offline" in modes:
            self._run = bounded(lambda: self._init("offline"), LOCAL_SECONDS)
            self._offline = True

    # -- what runs in a bounded thread
    # ----------------------------------------------------------------------

    def _modes(self) -> tuple[str, ...]:
        """Return the modes to try in turn."""
        import wandb

        # environment and settings files; `wandb offline` writes such a file
        settings = wandb.setup().settings
        if self.config.mode == "auto" and settings.mode in ("offline", "dryrun"):
            return ("offline",)
        if self.config.mode == "auto" and settings.mode == "disabled":
            return ()
        if self.config.mode == "offline":
            return ("offline",)
        if logged_in(settings.api_key, settings.base_url):
            return ("online", "offline")
        if self.config.mode == "online":
            log.warning(
                "tracker.mode=online, but W&B has no key (`wandb login` stores one): the run goes"
                " on offline"
            )
        return ("offline",)

    def _init(self, mode: str) -> Any:
        import wandb

        info = self._info
        # left by an earlier failure; init() may hand it out instead of a new one
        if wandb.run is not None:
            with contextlib.suppress(Exception):
                wandb.run.finish()
        run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            dir=str(info.directory.absolute()),
            config=info.config,
            name=self.config.name or info.name,
            group=self.config.group or info.group,
            job_type=self.config.job_type or info.job_type,
            tags=[
                tag[:TAG_LENGTH] for tag in dict.fromkeys((*info.tags, *self.config.tags)) if tag
            ],
            id=self._id,
            resume="allow" if info.wandb_id else None,
            mode=mode,  # type: ignore[arg-type]
            settings=self._settings(),
        )
        define_metrics(run)
        return run

    def _settings(self) -> Any:
        """Silent; no console capture, code, git state or machine paths. Settings this wandb lacks
        are left out."""
        import wandb

        wanted: dict[str, Any] = {
            "silent": True,
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "disable_job_creation": True,
            "save_code": False,
            "symlink": False,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
            "host": "",
            "init_timeout": self.config.init_timeout,
            "finish_timeout": self.config.finish_timeout,
        }
        return wandb.Settings(
            **{k: v for k, v in wanted.items() if k in wandb.Settings.model_fields}
        )

    def _log_round(self, record: RoundRecord) -> None:
        row: dict[str, Any] = {"round": record.round}
        row |= {
            metric_name(column): value
            for column, value in record.values.items()
            if value is not None
        }
        row |= {analysis_metric(name): value for name, value in record.analysed.items()}
        others = {
            v: each for v, each in record.others.items() if each.rounds[-1:] == [record.round]
        }
        views = {v: each.class_accuracy[-1] for v, each in others.items()}
        if record.class_accuracy is not None:
            views = {PLAIN: record.class_accuracy} | views
        for view, values in views.items():
            accuracy = zip(self._info.classes, values.tolist(), strict=True)
            row |= {
                class_metric(name, view): value for name, value in accuracy if not math.isnan(value)
            }
        row |= self._interim_images(record)
        # Steps that follow from the round: what a resumed run repeats is dropped by W&B instead of
        # logged twice.
        self._run.log(row, step=record.round * STEPS, commit=True)

    def _interim_images(self, record: RoundRecord) -> dict[str, Any]:
        every, total = self.config.image_interval(self._info.total_rounds), self._info.total_rounds
        # those of the last round come anyway
        if every is None or record.round % every or not 0 < record.round < total:
            return {}
        if record.class_accuracy is None or record.history is None:
            return {}
        from PIL import Image

        from fedexp.figures import interim_pictures

        pictures = interim_pictures(self._info.directory, record.history, record.others)
        return _images(
            {name: Image.open(io.BytesIO(content)) for name, content in pictures.items()}
        )

    def _log_results(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: Mapping[str, "pd.DataFrame"]
    ) -> None:
        # Without a step: they get those after the last round's, so that a run of more rounds logs
        # the next round.
        self._run.summary.update(flat_summary(summary))
        images = _images({path.stem: str(path) for path in figures if path.suffix == ".png"})
        self._run.log({"round": self._last_round} | images, commit=not tables)
        if tables:
            self._run.log({f"tables/{name}": _table(table) for name, table in tables.items()})

    # -- keeping W&B in its place
    # ---------------------------------------------------------------------------

    def _guard(self, what: str, action: Callable[[], None], seconds: float) -> None:
        """Run the action; after a failure W&B is switched off with one warning."""
        if self._run is None:
            return
        try:
            bounded(action, seconds)
        except Exception as error:
            log.warning(
                "W&B could not %s; the run goes on without it (%s)%s",
                what,
                _reason(error),
                self._sync_hint(),
            )
            self._run = None
            self._end(GRACE_SECONDS)

    def _close(self, exit_code: int) -> None:
        seconds = self.config.finish_timeout + GRACE_SECONDS
        self._guard("finish in time", lambda: self._run.finish(exit_code), seconds)
        if self._run is not None and self._offline:
            log.info("W&B is offline%s", self._sync_hint())
        self.complete = self._run is not None and exit_code == 0
        self._run = None
        self._end(seconds)

    def _end(self, seconds: float) -> None:
        """Leave nothing open; after the first call there is nothing to do."""
        if self._restore_environment is not None:
            end_service(seconds)
            self._restore_environment()
            self._restore_environment = None

    def _sync_hint(self) -> str:
        if self._run is None:
            return ""
        return f"; upload with: wandb sync {display_path(Path(self._run.dir).parent)}"

    def _discard_attempt(self) -> None:
        """Remove what an online attempt that failed has left, so that `wandb sync` does not find
        the run twice."""
        end_service(GRACE_SECONDS)
        for path in (self._info.directory / "wandb").glob(f"run-*-{self._id}"):
            if path.name not in self._older:
                shutil.rmtree(path, ignore_errors=True)


def _images(pictures: Mapping[str, Any]) -> dict[str, Any]:
    """pictures: name -> path or PIL image."""
    import wandb

    return {f"figures/{name}": wandb.Image(picture) for name, picture in pictures.items()}


def _table(table: "pd.DataFrame") -> Any:
    """Return a W&B table whose empty cells stay empty, also in columns of text."""
    import wandb

    cells = table.astype(object).where(table.notna(), None)
    return wandb.Table(
        columns=list(map(str, cells.columns)), data=cells.to_numpy(), allow_mixed_types=True
    )


def _new_id() -> str:
    """Return a fresh id for each run, also in one process; a W&B sweep agent hands out its own."""
    given = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    return given or secrets.token_hex(4)


def _reason(error: Exception) -> str:
    """Return the first line of an error."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
