"""Write the results of each round to tables and checkpoints, and pass them to the callbacks."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedexp.data.views import file_in_view
from fedexp.rundir import checkpoint, files
from fedexp.rundir.csv_files import CsvFile
from fedexp.trackers.base import Callback, Callbacks, RoundRecord
from fedexp.training import rows
from fedexp.training.callbacks import CALLBACK
from fedexp.training.simulation import Simulation
from fedexp.training.state import RoundResult, State

SAVING_SHARE = 0.05  # largest share of the time for checkpoints if checkpoint_interval is null


class Recorder:
    """Writes the results of a run to its directory.

    Each round is written before the next round starts.
    """

    def __init__(
        self,
        directory: Path,
        simulation: Simulation,
        callbacks: Sequence[Callback],
        lengths: Mapping[str, int] | None,
    ):
        """Open the files.

        lengths: the lengths of the files as recorded in the checkpoint, so that rows written after
            it are removed. None for a new run.
        """
        self.directory, self.simulation = directory, simulation
        self.callbacks, known = Callbacks(callbacks), lengths or {}
        self.files = {
            name: CsvFile(directory / name, columns, known.get(name))
            for name, columns in rows.table_columns(simulation).items()
        }
        self.writing_seconds = 0.0  # time for the last round
        self.saving_seconds = 0.0  # time for the last checkpoint
        self._saved_at = time.perf_counter()

    def write(self, state: State, result: RoundResult | None = None) -> None:
        """Write the results of a round to the files, and pass them to the callbacks.

        state: the state of the run after the round.
        result: the result of the round. None for the initial model.
        """
        start = time.perf_counter()
        row = rows.round_row(self.simulation, state, result)
        self._append_tests(state)
        self.files[files.ROUNDS].append([row])
        self._call_back(state, row, result)
        if result is not None:
            self.files[files.CLIENTS].append(rows.client_rows(self.simulation, state, result))
        if result is None or state.status != "running" or self._is_due(state.round):
            self.save_checkpoint(state)
        self.writing_seconds = time.perf_counter() - start

    def wants_epochs(self, number: int) -> bool:
        """Return whether a callback reads the models after each local epoch of a round."""
        return any(self.callbacks.call("wants_epochs", number))

    def _append_tests(self, state: State) -> None:
        for view, each in state.records.items():
            for name, new in each.new_rows(state.round).items():
                self.files[file_in_view(name, view)].append(new)
        if self.simulation.has_tasks and state.record.rounds[-1] == state.round:
            self.files[files.TASKS].append(rows.task_rows(self.simulation, state))

    def _call_back(self, state: State, row: rows.Row, result: RoundResult | None) -> None:
        """Call the callbacks, and stop the run if one of them asks for it."""
        record = RoundRecord(
            state.round,
            {name: rows.json_value(row.get(name)) for name in self.files[files.ROUNDS].columns[1:]},
            state.records,
            model={part: state.server[part] for part in ("params", "buffers")},
            result=result,
        )
        for reason in filter(None, self.callbacks.call("after_round", record)):
            if state.status == "running":
                state.stop(
                    {"by": CALLBACK, "reason": reason} if isinstance(reason, str) else reason
                )
        if self.simulation.has_tasks and state.round and self.simulation.ends_task(state.round):
            self.callbacks.call("after_task", record)

    def save_checkpoint(self, state: State) -> None:
        """Save a checkpoint with the state and the lengths of the tables.

        Nothing is saved before the first round has been recorded.
        """
        if not state.record.rounds:
            return
        start = time.perf_counter()
        # Sync the tables first, so that the checkpoint never records rows that are not yet on the
        # disk. If the directory was removed, this fails, so no file is created.
        for table in self.files.values():
            table.sync()
        lengths = {name: table.length for name, table in self.files.items()}
        kept = {each.key: each.state_dict() for each in self.callbacks.members}
        versions = state.clients.save(self.directory / files.CLIENT_STATES, state.round)
        saved = state.to_tree(versions) | {"lengths": lengths, "callbacks": kept}
        checkpoint.save(self.directory, saved)
        state.clients.tidy()
        self._saved_at = time.perf_counter()
        self.saving_seconds = self._saved_at - start

    def _is_due(self, number: int) -> bool:
        """Return whether to save a checkpoint after this round."""
        interval = self.simulation.settings.checkpoint_interval
        if interval is not None:
            return number % interval == 0
        return self.saving_seconds <= SAVING_SHARE * (time.perf_counter() - self._saved_at)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the block ends, e.g. while a round is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, frame: held.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])
