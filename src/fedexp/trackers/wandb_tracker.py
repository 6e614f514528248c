"""Track runs in Weights & Biases. If W&B fails, the run continues.

W&B writes its files to `<run directory>/wandb`, and staged tables to its own data directory.
"""

import io
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fedexp.core.errors import describe
from fedexp.core.limits import Limit, Name, Positive
from fedexp.core.storage import typed_path
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker, TrackerConfig
from fedexp.trackers.names import SUMMARIES, flat_summary, metric_values

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedexp")

Mode = Literal["auto", "online", "offline", "disabled"]
Interval = Annotated[
    float,
    Limit(
        "a whole number of rounds, or a fraction of all rounds from 0 to 1",
        lambda value: value >= 0 and (value < 1 or float(value).is_integer()),
    ),
]
TAG_LENGTH = 64  # W&B's limit for a tag; a group or name may have 128 characters
# W&B steps per round. The final results use steps between the last round's step and the next
# round's, so the run can still be extended.
STEPS = 10
# Minimum number of rounds between images if `log_images_every` is a fraction of all rounds. More
# images would slow short runs down.
LEAST_INTERVAL = 10
# With these settings, W&B prints nothing and records no console output, code, git state or machine
# paths.
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
    "finish_timeout_raises": True,
}


class Wandb(TrackerConfig):
    """Configuration of `tracker=wandb`."""

    project: Name
    entity: str | None
    mode: Mode
    tags: tuple[str, ...]
    name: str | None
    log_images_every: Interval  # 0: only at the end
    init_timeout: Positive  # seconds
    finish_timeout: Positive  # seconds

    def image_interval(self, rounds: int) -> int | None:
        """Return the number of rounds between images, or None for images only at the end."""
        every = self.log_images_every
        if 0 < every < 1:
            return max(round(every * rounds), LEAST_INTERVAL)
        return int(every) or None

    def modes(self) -> tuple[str, ...]:
        """Return the modes to try, in order."""
        # wandb reads the environment and settings files; `wandb offline` writes such a file.
        settings = wandb_settings()
        if self.mode == "auto" and settings.mode == "disabled":
            return ("disabled",)
        offline = self.mode == "auto" and settings.mode in ("offline", "dryrun")
        if self.mode != "offline" and not offline and is_logged_in(settings):
            return ("online", "offline")
        return ("offline",)

    def create(self) -> Tracker:
        return Tracker() if self.mode == "disabled" else WandbTracker(self)


class WandbTracker(Tracker):
    """One W&B run. It prints nothing, never prompts the user, and is always closed."""

    name: ClassVar[str] = "W&B"

    def __init__(self, config: Wandb) -> None:
        self.config = config
        self._run: Any = None
        self._id: str | None = None
        self._known: str | None = None  # the id of an earlier part of this run

    def state_dict(self) -> dict[str, Any]:
        known = self._id or self._known
        return {"id": known} if known else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = state.get("id")

    def start(self, info: RunInfo) -> None:
        self.info, self._last_round = info, info.first_round
        # a run without a saved state starts again, under the same id
        self._known = self._known or last_wandb_id(info.directory)
        self._id = self._known or secrets.token_hex(4)
        self._run = self._open()
        if not info.resumed:
            return
        # A killed process takes the rounds along that it had not yet sent or written. An offline
        # run is written anew, so that one `wandb sync` uploads the whole run.
        first = self._run.step
        for record in info.past():
            if record.round * STEPS >= first:
                self.after_round(record)

    def after_round(self, record: RoundRecord) -> None:
        self._last_round = record.round
        row = {"round": record.round, **metric_values(record, self.info.classes)}
        with self._hint_if_it_fails():
            row |= self._interim_images(record)
            # A resumed run repeats rounds; W&B drops the steps that it already has.
            self._run.log(row, step=record.round * STEPS, commit=True)

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: "Mapping[str, pd.DataFrame]"
    ) -> None:
        # No explicit step: W&B then uses the steps after the last round's, and leaves the next
        # round's step free for an extended run.
        pictures = {path.stem: str(path) for path in figures if path.suffix == ".png"}
        with self._hint_if_it_fails():
            self._run.summary.update(flat_summary(summary))
            self._run.log({"round": self._last_round} | as_images(pictures), commit=not tables)
            if tables:
                self._run.log({f"tables/{name}": as_table(table) for name, table in tables.items()})
        self._end(0)

    def abort(self) -> None:
        self._end(1)

    def _open(self) -> Any:
        """Open the W&B run: online if this is requested and possible, and offline otherwise."""
        modes = self.config.modes()
        if self.config.mode == "online" and "online" not in modes:
            log.warning(
                "tracker.wandb.mode=online: W&B has no API key (log in with `wandb login`); the run"
                " continues offline"
            )
        for mode in modes:
            try:
                return self._init(mode)
            except Exception as error:
                end_service()
                if mode == modes[-1]:
                    raise
                log.warning(
                    "W&B cannot be reached; the run continues offline (%s)", describe(error)
                )

    def _init(self, mode: str) -> Any:
        import wandb

        info, config = self.info, self.config
        tags = dict.fromkeys((*info.tags, *config.tags))
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            dir=str(info.directory.absolute()),
            config=info.config,
            name=config.name or info.name,
            group=info.group,
            job_type=info.job_type,
            tags=[tag[:TAG_LENGTH] for tag in tags if tag],
            id=self._id,
            # Offline, W&B cannot know what the server has, so each part is a whole run.
            resume="allow" if self._known and mode == "online" else None,
            mode=mode,  # type: ignore[arg-type]
            reinit="create_new",  # even if an earlier failure has left a run open
            settings=wandb.Settings(
                **SETTINGS, init_timeout=config.init_timeout, finish_timeout=config.finish_timeout
            ),
        )
        run.define_metric("round")
        for name, summary in SUMMARIES.items():
            run.define_metric(name, step_metric="round", summary=summary)
        return run

    def _end(self, code: int) -> None:
        offline, hint = self._run.offline, self._hint()
        with self._hint_if_it_fails():
            self._run.finish(code)
        end_service()
        if offline:
            log.info("W&B is offline%s", hint)

    @contextmanager
    def _hint_if_it_fails(self) -> Iterator[None]:
        """Add a note with the upload command to the exception of a failed call."""
        try:
            yield
        except Exception as error:
            error.add_note(self._hint())
            end_service()
            raise

    def _hint(self) -> str:
        option = "" if self._run.offline else "--include-online "
        return f"; upload with: wandb sync {option}{typed_path(Path(self._run.dir).parent)}"

    def _interim_images(self, record: RoundRecord) -> dict[str, Any]:
        total = self.info.total_rounds
        every = self.config.image_interval(total)
        # Images of the last round are logged with the results.
        if every is None or record.round % every or not 0 < record.round < total:
            return {}
        if not record.tested:
            return {}
        from PIL import Image

        pictures = self.info.pictures(record.records)
        return as_images({k: Image.open(io.BytesIO(content)) for k, content in pictures.items()})


def as_images(pictures: Mapping[str, Any]) -> dict[str, Any]:
    """Convert pictures to W&B images. pictures: a dict that maps names to paths or PIL images."""
    import wandb

    return {f"figures/{name}": wandb.Image(picture) for name, picture in pictures.items()}


def as_table(table: "pd.DataFrame") -> Any:
    """Convert a table to a W&B table. Empty cells stay empty, even in text columns."""
    import wandb

    cells = table.astype(object).where(table.notna(), None)
    return wandb.Table(
        columns=list(map(str, cells.columns)), data=cells.to_numpy(), allow_mixed_types=True
    )


def end_service() -> None:
    """End wandb-core, so that the next run can start a new one even after a failure."""
    import wandb

    with suppress(Exception):
        wandb.teardown()


def wandb_settings() -> Any:
    """Return wandb's settings. Afterwards, wandb prints nothing."""
    import wandb

    return wandb.setup(wandb.Settings(silent=True)).settings


def is_logged_in(settings: Any) -> bool:
    """Return whether credentials exist for the server in wandb's settings.

    The server is not contacted. The settings include environment variables and settings files, but
    not netrc, which is read separately.
    """
    from requests.utils import get_netrc_auth  # requests is a dependency of wandb

    return bool(settings.api_key or get_netrc_auth(settings.base_url))


def last_wandb_id(directory: Path) -> str | None:
    """Return the id of the newest W&B run in a directory, or None if there is none.

    The id is read from the name of the run's file: a folder is `run-<time>-<id>` or
    `offline-run-<time>-<id>`, followed by `-1` if that name was taken within the same second.
    """
    files = (directory / "wandb").glob("*run-*-*/run-*.wandb")
    newest = max(files, default=None, key=lambda path: path.parent.name.split("run-")[1])
    return newest.stem.removeprefix("run-") if newest else None
