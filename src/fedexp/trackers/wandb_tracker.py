"""Weights & Biases as a view of a run, which can fail or hang without stopping the run.

Every call of wandb runs in a thread with a time limit; after the first failure the tracker warns
once and is silent. W&B's files stay below `<run directory>/wandb`.
"""

import io
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedexp.core.errors import require, require_choice
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker, TrackerConfig, display_path
from fedexp.trackers.guarded import Guarded, metrics_of, reason
from fedexp.trackers.wandb_names import define_metrics, flat_summary
from fedexp.trackers.wandb_service import bounded, end_service, logged_in, set_environment

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedexp")

MODES = ("auto", "online", "offline", "disabled")
# Calls that need no server take milliseconds to a few seconds; longer means that wandb hangs.
LOCAL_SECONDS = 30.0
GRACE_SECONDS = 5.0  # wandb's own timeouts come first, so that it can clean up
TAG_LENGTH = 64  # W&B's limit; of groups and names it is 128
# W&B steps per round: after each round there is room for results, should the run be extended.
STEPS = 10
# Rounds between images where they are given as a share of all rounds, so that short runs stay fast.
LEAST_INTERVAL = 10
# Silent; no console capture, code, git state or machine paths.
SETTINGS: Mapping[str, Any] = {
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
}


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
    log_images_every: float  # rounds; below 1: share of all rounds; 0: only at the end
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
        for name in ("init_timeout", "finish_timeout"):
            seconds = getattr(self, name)
            require(seconds > 0, f"tracker.{name}", seconds, "greater than 0")

    def image_interval(self, rounds: int) -> int | None:
        """Return the rounds between images in a run of so many; None: none before the end."""
        every = self.log_images_every
        if 0 < every < 1:
            return max(round(every * rounds), LEAST_INTERVAL)
        return int(every) or None

    @property
    def stays(self) -> bool:
        try:
            return self.mode == "disabled" or "online" not in bounded(self.modes, LOCAL_SECONDS)
        except Exception:  # whatever wandb raises: it may be online a moment later
            return False

    def modes(self) -> tuple[str, ...]:
        """Return the modes to try in turn."""
        import wandb

        # environment and settings files; `wandb offline` writes such a file
        settings = wandb.setup().settings
        if self.mode == "auto" and settings.mode in ("offline", "dryrun"):
            return ("offline",)
        if self.mode == "auto" and settings.mode == "disabled":
            return ()
        if self.mode != "offline" and logged_in(settings.api_key, settings.base_url):
            return ("online", "offline")
        return ("offline",)

    def create(self) -> Tracker:
        return Tracker() if self.mode == "disabled" else WandbTracker(self)


class WandbTracker(Guarded):
    """One W&B run: silent, without prompts, and always closed."""

    service: ClassVar[str] = "W&B"

    def __init__(self, config: Wandb) -> None:
        super().__init__()
        self.config = config
        self.complete = False  # the whole run is with W&B, or in the files for `wandb sync`
        self._run: Any = None
        self._id: str | None = None
        self._offline = False
        self._seconds = 0.0
        self._restore_environment: Callable[[], None] | None = None

    @property
    def run_id(self) -> str | None:
        return self._id

    def start(self, info: RunInfo) -> None:
        self._seconds = LOCAL_SECONDS
        self._id = info.wandb_id or new_id()
        self._restore_environment = set_environment(info.directory.absolute() / "wandb")
        super().start(info)
        if self._run is None and self._open:  # W&B is disabled
            self._open = False
            self.release()

    def begin(self, info: RunInfo) -> None:
        """Open the W&B run, online if that is asked for and possible, else offline."""
        modes = bounded(self.config.modes, LOCAL_SECONDS)
        if self.config.mode == "online" and "online" not in modes:
            log.warning(
                "tracker.mode=online, but W&B has no key (`wandb login` stores one): the run goes"
                " on offline"
            )
        if "online" in modes:
            older = set((info.directory / "wandb").glob("run-*"))
            try:
                seconds = self.config.init_timeout + GRACE_SECONDS
                self._run = bounded(lambda: self._init("online"), seconds)
                return
            except Exception as error:
                log.warning("W&B cannot be reached; the run continues offline (%s)", reason(error))
                end_service(GRACE_SECONDS)
                # Else `wandb sync` would find the run twice.
                for path in (info.directory / "wandb").glob(f"run-*-{self._id}"):
                    if path not in older:
                        shutil.rmtree(path, ignore_errors=True)
        if "offline" in modes:
            self._run = bounded(lambda: self._init("offline"), LOCAL_SECONDS)
            self._offline = True

    def add_round(self, record: RoundRecord) -> None:
        row = {"round": record.round, **metrics_of(record, self.info.classes)}
        # W&B drops steps that it has: a resumed run repeats rounds.
        images = self._interim_images(record)
        self._run.log(row | images, step=record.round * STEPS, commit=True)

    def add_results(
        self,
        summary: Mapping[str, Any],
        figures: Sequence[Path],
        tables: "Mapping[str, pd.DataFrame]",
    ) -> None:
        # Without a step: they get those after the last round's, so that an extended run logs the
        # next round.
        self._run.summary.update(flat_summary(summary))
        images = log_images({path.stem: str(path) for path in figures if path.suffix == ".png"})
        self._run.log({"round": self._last_round} | images, commit=not tables)
        if tables:
            self._run.log({f"tables/{name}": log_table(table) for name, table in tables.items()})

    def end(self, completed: bool) -> None:
        self._run.finish(0 if completed else 1)

    def call(self, action: Callable[[], None]) -> None:
        if self._run is None:
            action()  # `begin`, which bounds its calls itself
        else:
            bounded(action, self._seconds)

    def _close(self, completed: bool) -> bool:
        self._seconds = self.config.finish_timeout + GRACE_SECONDS
        hint = self.hint()
        worked = super()._close(completed)
        if worked and self._offline:
            log.info("W&B is offline%s", hint)
        self.complete = worked and completed
        return worked

    def release(self) -> None:
        """Leave nothing open."""
        self._run = None
        if self._restore_environment is not None:
            end_service(GRACE_SECONDS)
            self._restore_environment()
            self._restore_environment = None

    def hint(self) -> str:
        if self._run is None:
            return ""
        return f"; upload with: wandb sync {display_path(Path(self._run.dir).parent)}"

    def _init(self, mode: str) -> Any:
        import wandb

        info, config = self.info, self.config
        if wandb.run is not None:  # left by an earlier failure; init() may return it
            with suppress(Exception):
                wandb.run.finish()
        wanted: dict[str, Any] = {
            **SETTINGS,
            "init_timeout": config.init_timeout,
            "finish_timeout": config.finish_timeout,
        }
        known = {k: v for k, v in wanted.items() if k in wandb.Settings.model_fields}
        tags = dict.fromkeys((*info.tags, *config.tags))
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            dir=str(info.directory.absolute()),
            config=info.config,
            name=config.name or info.name,
            group=config.group or info.group,
            job_type=config.job_type or info.job_type,
            tags=[tag[:TAG_LENGTH] for tag in tags if tag],
            id=self._id,
            resume="allow" if info.wandb_id else None,
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(**known),
        )
        define_metrics(run)
        return run

    def _interim_images(self, record: RoundRecord) -> dict[str, Any]:
        total = self.info.total_rounds
        every = self.config.image_interval(total)
        # those of the last round come with the results
        if every is None or record.round % every or not 0 < record.round < total:
            return {}
        if record.class_accuracy is None or record.history is None:
            return {}
        from PIL import Image

        from fedexp.figures import interim_pictures

        pictures = interim_pictures(self.info.directory, record.history, record.others)
        return log_images({k: Image.open(io.BytesIO(content)) for k, content in pictures.items()})


def log_images(pictures: Mapping[str, Any]) -> dict[str, Any]:
    """pictures: name -> path or PIL image."""
    import wandb

    return {f"figures/{name}": wandb.Image(picture) for name, picture in pictures.items()}


def log_table(table: "pd.DataFrame") -> Any:
    """Return a W&B table whose empty cells stay empty, also in columns of text."""
    import wandb

    cells = table.astype(object).where(table.notna(), None)
    return wandb.Table(
        columns=list(map(str, cells.columns)), data=cells.to_numpy(), allow_mixed_types=True
    )


def new_id() -> str:
    """Return a fresh id for each run, also in one process; a W&B sweep agent brings one."""
    given = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    return given or secrets.token_hex(4)
