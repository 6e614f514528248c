"""Track runs in TensorBoard. `tensorboard --logdir outputs` shows the event files of all runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedexp.core import storage
from fedexp.core.packages import import_extra
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker, TrackerConfig
from fedexp.trackers.names import metric_values

if TYPE_CHECKING:
    import pandas as pd


EVENTS = "events.out.tfevents.*"  # glob pattern


class TensorBoard(TrackerConfig):
    """Configuration of `tracker=tensorboard`."""

    # each run writes to a folder of its own in `logdir`, see `event_folder`
    logdir: str | None

    def check(self) -> None:
        import_extra("tensorboard", "tensorboard", "tracker=tensorboard")

    def create(self) -> Tracker:
        return TensorBoardTracker(self)


class TensorBoardTracker(Tracker):
    """The event files of one run. Metrics have the same names as in W&B. The step is the round."""

    name: ClassVar[str] = "TensorBoard"

    def __init__(self, config: TensorBoard) -> None:
        self.config = config
        self._last_round = -1  # that the event files have

    def state_dict(self) -> dict[str, Any]:
        return {"round": self._last_round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_round = state.get("round", -1)  # runs of earlier versions lack it

    def start(self, info: RunInfo) -> None:
        self.classes = info.classes
        from torch.utils.tensorboard import SummaryWriter

        folder = event_folder(info.directory, self.config.logdir)
        if not any(folder.glob(EVENTS)):  # such as in a new `logdir`
            self._last_round = -1
        # A resumed run repeats rounds that may be in an earlier event file, and the folder may have
        # those of a run that this one replaces. With purge_step, TensorBoard discards their values.
        self.writer = SummaryWriter(str(folder), purge_step=self._last_round + 1)
        if self._last_round < 0:
            text = storage.dump_yaml(info.config)
            self.writer.add_text("config", as_code(text), 0)
        # rounds without this tracker, which may be new or have failed
        for record in info.past():
            if record.round > self._last_round:
                self.after_round(record)

    def after_round(self, record: RoundRecord) -> None:
        for name, value in metric_values(record, self.classes).items():
            self.writer.add_scalar(name, value, record.round)
        self.writer.flush()
        self._last_round = record.round

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: "Mapping[str, pd.DataFrame]"
    ) -> None:
        import numpy as np
        from PIL import Image

        for path in (each for each in figures if each.suffix == ".png"):
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self.writer.add_image(
                f"figures/{path.stem}", pixels, self._last_round, dataformats="HWC"
            )
        self.writer.add_text(
            "summary", as_code(json.dumps(summary, indent=2, default=str)), self._last_round
        )
        self.writer.close()

    def abort(self) -> None:
        self.writer.close()


def event_folder(directory: Path, logdir: str | None) -> Path:
    """Return the folder for the event files of a run, the same from any working directory.

    In `logdir`, it is named by the path of the run directory from the folder that has `logdir`. If
    the run is not in that folder, its absolute path is used.
    """
    if logdir is None:
        return directory / "tensorboard"
    folder, run = Path(logdir).resolve(), directory.resolve()
    inside = run.is_relative_to(folder.parent)
    return folder / run.relative_to(folder.parent if inside else run.anchor)


def as_code(text: str) -> str:
    """Return Markdown that shows a text verbatim: each line is indented by four spaces."""
    return "\n".join(f"    {line}" for line in text.splitlines())
