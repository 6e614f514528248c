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


class TensorBoard(TrackerConfig):
    """Configuration of `tracker=tensorboard`."""

    # each run writes to a folder in `logdir`, or to <run directory>/tensorboard if `logdir` is None
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
        self._last_round = state["round"]

    def start(self, info: RunInfo) -> None:
        self.classes = info.classes
        from torch.utils.tensorboard import SummaryWriter

        folder = info.directory / "tensorboard"
        if self.config.logdir is not None:
            folder = Path(self.config.logdir) / info.directory.name
        # A run that starts again or is resumed repeats rounds that may be in an earlier event file.
        # With purge_step, TensorBoard discards the earlier values.
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


def as_code(text: str) -> str:
    """Return Markdown that shows a text verbatim: each line is indented by four spaces."""
    return "\n".join(f"    {line}" for line in text.splitlines())
