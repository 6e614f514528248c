"""Several trackers at once: each is told everything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core.errors import require
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker, TrackerConfig

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Several(TrackerConfig):
    """Configuration of `tracker=[a,b]`, in which names stand for nodes."""

    members: list[TrackerConfig]

    def __post_init__(self) -> None:
        kinds = [type(member).__name__ for member in self.members]
        require(len(set(kinds)) == len(kinds), "tracker.members", kinds, "different trackers")

    @property
    def stays(self) -> bool:
        return all(member.stays for member in self.members)

    def check(self) -> None:
        for member in self.members:
            member.check()

    def create(self) -> Tracker:
        return Together([member.create() for member in self.members])


class Together(Tracker):
    """Trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers

    @property
    def run_id(self) -> str | None:
        return next(
            (tracker.run_id for tracker in self.trackers if tracker.run_id is not None), None
        )

    def start(self, info: RunInfo) -> None:
        for tracker in self.trackers:
            tracker.start(info)

    def log_round(self, record: RoundRecord) -> None:
        for tracker in self.trackers:
            tracker.log_round(record)

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: "Mapping[str, pd.DataFrame]"
    ) -> None:
        for tracker in self.trackers:
            tracker.finish(summary, figures, tables)

    def abort(self) -> None:
        for tracker in self.trackers:
            tracker.abort()
