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

    def start(self, info: RunInfo) -> None:
        self.classes, self._last_round = info.classes, info.first_round
        from torch.utils.tensorboard import SummaryWriter

        folder = info.directory / "tensorboard"
        if self.config.logdir is not None:
            folder = Path(self.config.logdir) / info.directory.name
        # A resumed run repeats rounds that may be in an earlier event file. With purge_step,
        # TensorBoard discards the earlier values.
        again = info.first_round + 1 if info.resumed else None
        self.writer = SummaryWriter(str(folder), purge_step=again)
        if again is None:
            text = storage.dump_yaml(info.config)
            self.writer.add_text("config", as_code(text), 0)

    def after_round(self, record: RoundRecord) -> None:
        self._last_round = record.round
        for name, value in metric_values(record, self.classes).items():
            self.writer.add_scalar(name, value, record.round)
        self.writer.flush()

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
