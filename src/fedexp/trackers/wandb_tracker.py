"""Track runs in Weights & Biases. If W&B fails or hangs, the run continues.

Every call to wandb runs in a thread with a time limit. W&B writes its files to
`<run directory>/wandb`.
"""

import io
import logging
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from fedexp.core.limits import Limit, Name, Positive
from fedexp.core.private.wandb_internals import service_process
from fedexp.core.storage import display_path
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker, TrackerConfig
from fedexp.trackers.names import SUMMARIES, flat_summary, metric_values
from fedexp.trackers.several import reason

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
log = logging.getLogger("fedexp")

Mode = Literal["auto", "online", "offline", "disabled"]
Interval = Annotated[
    float,
    Limit(
        "a whole number of rounds, or a fraction of all rounds from 0 to 1",
        lambda value: value >= 0 and (value < 1 or float(value).is_integer()),
    ),
]
# Time limit for calls that need no server. Such a call takes a few seconds unless wandb hangs.
LOCAL_SECONDS = 30.0
GRACE_SECONDS = 5.0  # added to wandb's own timeout, so that wandb can clean up first
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
        """Return the modes to try, in order. The result is empty if W&B is disabled."""
        import wandb

        # wandb reads the environment and settings files; `wandb offline` writes such a file.
        settings = wandb.setup().settings
        if self.mode == "auto" and settings.mode == "disabled":
            return ()
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
        self._held = ExitStack()  # wandb-core and its environment variables

    @property
    def run_id(self) -> str | None:
        return self._id

    def start(self, info: RunInfo) -> None:
        self.info, self._last_round = info, info.first_round
        self._id = info.wandb_id or secrets.token_hex(4)
        self._held.enter_context(wandb_service(info.directory.absolute() / "wandb"))
        try:
            self._run = self._open()
        finally:
            if self._run is None:  # it failed, or W&B is disabled
                self._held.close()
        if info.resumed:
            self._log_past_rounds(info)

    def _log_past_rounds(self, info: RunInfo) -> None:
        """Log the rounds before a resumed run continues that W&B does not have.

        A killed process takes the rounds along that it had not yet sent or written. An offline run
        is written anew, so that one `wandb sync` uploads the whole run.
        """
        first: list[int] = []
        self._call(lambda run: first.append(run.step))
        for record in info.past() if first else ():
            if record.round * STEPS >= first[0]:
                self.log_round(record)

    def log_round(self, record: RoundRecord) -> None:
        self._last_round = record.round
        row = {"round": record.round, **metric_values(record, self.info.classes)}
        # A resumed run repeats rounds; W&B drops the steps that it already has.
        self._call(
            lambda run: run.log(
                row | self._interim_images(record), step=record.round * STEPS, commit=True
            )
        )

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: "Mapping[str, pd.DataFrame]"
    ) -> None:
        # No explicit step: W&B then uses the steps after the last round's, and leaves the next
        # round's step free for an extended run.
        pictures = {path.stem: str(path) for path in figures if path.suffix == ".png"}

        def log_results(run: Any) -> None:
            run.summary.update(flat_summary(summary))
            run.log({"round": self._last_round} | as_images(pictures), commit=not tables)
            if tables:
                run.log({f"tables/{name}": as_table(table) for name, table in tables.items()})

        self._call(log_results)
        self._end(0)

    def abort(self) -> None:
        self._end(1)

    def _open(self) -> Any:
        """Open the W&B run and return it, or None if W&B is disabled.

        The run is online if this is requested and possible, and offline otherwise.
        """
        modes = call_with_timeout(self.config.modes, LOCAL_SECONDS)
        if self.config.mode == "online" and "online" not in modes:
            log.warning(
                "tracker.mode=online: W&B has no API key (log in with `wandb login`); the run"
                " continues offline"
            )
        if "online" in modes:
            try:
                seconds = self.config.init_timeout + GRACE_SECONDS
                return call_with_timeout(lambda: self._init("online"), seconds)
            except Exception as error:
                log.warning("W&B cannot be reached; the run continues offline (%s)", reason(error))
                end_service()
        return call_with_timeout(lambda: self._init("offline"), LOCAL_SECONDS) if modes else None

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
            resume="allow" if info.wandb_id and mode == "online" else None,
            mode=mode,  # type: ignore[arg-type]
            reinit="create_new",  # even if an earlier failure has left a run open
            settings=wandb.Settings(**SETTINGS, init_timeout=config.init_timeout),
        )
        run.define_metric("round")
        for name, summary in SUMMARIES.items():
            run.define_metric(name, step_metric="round", summary=summary)
        return run

    def _call(self, action: Callable[[Any], object], seconds: float | None = None) -> None:
        """Call an action on the W&B run if a run is open.

        If the action fails, a note with the upload command is added to its exception.
        """
        run = self._run
        if run is None:
            return
        try:
            call_with_timeout(lambda: action(run), seconds or LOCAL_SECONDS)
        except Exception as error:
            error.add_note(self._hint())
            self._run = None
            self._held.close()
            raise

    def _end(self, code: int) -> None:
        if self._run is None:
            return
        offline, hint = self._run.offline, self._hint()
        self._call(lambda run: run.finish(code), self.config.finish_timeout)
        if offline:
            log.info("W&B is offline%s", hint)
        self._run = None
        self._held.close()

    def _hint(self) -> str:
        option = "" if self._run.offline else "--include-online "
        return f"; upload with: wandb sync {option}{display_path(Path(self._run.dir).parent)}"

    def _interim_images(self, record: RoundRecord) -> dict[str, Any]:
        total = self.info.total_rounds
        every = self.config.image_interval(total)
        # Images of the last round are logged with the results.
        if every is None or record.round % every or not 0 < record.round < total:
            return {}
        if record.class_accuracy is None:
            return {}
        from PIL import Image

        from fedexp.figures import interim_pictures

        pictures = interim_pictures(self.info.directory, record.histories)
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


def is_logged_in(settings: Any) -> bool:
    """Return whether credentials exist for the server in wandb's settings.

    The server is not contacted. The settings include environment variables and settings files, but
    not netrc, which is read separately.
    """
    from requests.utils import get_netrc_auth  # requests is a dependency of wandb

    return bool(settings.api_key or get_netrc_auth(settings.base_url))


def call_with_timeout(function: Callable[[], T], seconds: float) -> T:
    """Call a function in a thread and return its result, or raise its exception.

    Raises TimeoutError after `seconds`, and leaves the thread running. Raises RuntimeError if the
    function tries to exit the process.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)
        except BaseException as error:
            outcome.set_exception(RuntimeError(f"wandb tried to exit the process ({error!r})"))

    Thread(target=work, daemon=True, name="wandb call").start()
    return outcome.result(timeout=seconds)


@contextmanager
def wandb_service(folder: Path) -> Iterator[None]:
    """Silence W&B while the block runs, and end wandb-core afterwards.

    Inside the block, staged tables and logs are written to `folder`, unless the user's environment
    sets other directories. wandb-core reads these settings from environment variables only.
    """
    given = dict(os.environ)
    wanted = {
        "WANDB_SILENT": "true",
        "WANDB_DATA_DIR": given.get("WANDB_DATA_DIR", str(folder / "data")),
        "WANDB_CACHE_DIR": given.get("WANDB_CACHE_DIR", str(folder / "cache")),
    }
    os.environ.update(wanted)
    try:
        yield
    finally:
        end_service()
        # wandb sets WANDB_SERVICE, which would remain set if wandb-core were killed.
        for name in (*wanted, "WANDB_SERVICE"):
            os.environ.pop(name, None)
        os.environ.update({name: given[name] for name in wanted if name in given})


def end_service() -> None:
    """Stop wandb-core, and kill the process if it does not stop in time."""

    def teardown() -> None:
        import wandb

        wandb.teardown()

    process = service_process()
    try:
        call_with_timeout(teardown, GRACE_SECONDS)
    except Exception:
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
