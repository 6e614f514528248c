"""Track runs in MLflow. By default, runs are stored in local files, which `mlflow ui` shows."""

import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fedexp.core.limits import Limit, Name
from fedexp.rundir.fingerprint import flatten
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker, TrackerConfig, require_package
from fedexp.trackers.names import metric_values

if TYPE_CHECKING:
    import pandas as pd

# tag with the run directory, used to find the run when it is resumed
DIRECTORY = "fedexp.directory"
ENVIRONMENT = {  # environment variables that mlflow reads on import and when it opens a store
    "MLFLOW_ALLOW_FILE_STORE": "true",  # otherwise mlflow 3 rejects file stores
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# MLflow's limits: params and metrics per call, and characters per value in older versions
PARAMS, METRICS, LENGTH = 100, 1000, 500


class MLflow(TrackerConfig):
    """Configuration of `tracker=mlflow`."""

    store: Annotated[str, Limit("a directory, or the address of a server", bool)]
    experiment: Name

    def check(self) -> None:
        require_package("mlflow", "mlflow")

    def create(self) -> Tracker:
        return MLflowTracker(self)

    @property
    def uri(self) -> str:
        return self.store if "://" in self.store else Path(self.store).absolute().as_uri()


class MLflowTracker(Tracker):
    """One MLflow run.

    The configuration is logged as params, and the results as artifacts. Metrics have the same names
    as in W&B.
    """

    name: ClassVar[str] = "MLflow"

    def __init__(self, config: MLflow) -> None:
        self.config = config

    def start(self, info: RunInfo) -> None:
        self.classes = info.classes
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow.tracking import MlflowClient

            self.client = MlflowClient(tracking_uri=self.config.uri)
            experiment = self._experiment()
            place = str(info.directory.absolute())
            found = self._former(experiment, place) if info.resumed else None
            if found is None:
                tags = {
                    DIRECTORY: place,
                    "mlflow.runName": info.name,
                    "group": info.group,
                    "tags": ", ".join(info.tags),
                }
                found = self.client.create_run(experiment, tags=tags).info.run_id
                self._log_params(found, info.config)
            else:
                self.client.update_run(found, status="RUNNING")
        self.id = found
        logged = self.client.get_metric_history(found, "time/round") if info.resumed else []
        self._logged = max((metric.step for metric in logged), default=-1)

    def _experiment(self) -> str:
        """Return the experiment's id, and create the experiment if it does not exist.

        A second process may create the experiment at the same time.
        """
        for last in (False, True):
            if (found := self.client.get_experiment_by_name(self.config.experiment)) is not None:
                return found.experiment_id
            try:
                return self.client.create_experiment(self.config.experiment)
            except Exception:
                if last:
                    raise
        raise AssertionError("unreachable: the second failure is raised")

    def _former(self, experiment: str, place: str) -> str | None:
        runs = self.client.search_runs(
            [experiment], f"tags.`{DIRECTORY}` = '{place}'", max_results=1
        )
        return runs[0].info.run_id if runs else None

    def _log_params(self, run: str, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [
            Param(mlflow_name(key), str(value)[:LENGTH]) for key, value in flatten(config).items()
        ]
        for start in range(0, len(params), PARAMS):
            self.client.log_batch(run, params=params[start : start + PARAMS])

    def log_round(self, record: RoundRecord) -> None:
        from mlflow.entities import Metric

        if record.round <= self._logged:  # a resumed run repeats rounds with identical results
            return
        now = int(time.time() * 1000)
        values = metric_values(record, self.classes)
        metrics = [
            Metric(mlflow_name(name), value, now, record.round) for name, value in values.items()
        ]
        for start in range(0, len(metrics), METRICS):
            self.client.log_batch(self.id, metrics=metrics[start : start + METRICS])

    def finish(
        self, summary: dict[str, Any], figures: Sequence[Path], tables: "Mapping[str, pd.DataFrame]"
    ) -> None:
        self.client.log_dict(self.id, dict(summary), "summary.json")
        for path in figures:
            self.client.log_artifact(self.id, str(path), "figures")
        for name, table in tables.items():
            self.client.log_text(self.id, table.to_csv(index=False), f"tables/{name}.csv")
        self.client.set_terminated(self.id, "FINISHED")

    def abort(self) -> None:
        self.client.set_terminated(self.id, "FAILED")


def mlflow_name(name: str) -> str:
    """Replace characters that MLflow does not allow in a name by underscores."""
    return re.sub(r"[^\w.\-/: ]", "_", name)
