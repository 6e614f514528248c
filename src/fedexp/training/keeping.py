"""Save the models of the rounds that `keep_models` and `keep_local_models` select."""

import logging

from fedexp.config.settings import Settings
from fedexp.rundir import kept_models
from fedexp.trackers.base import Callback, RoundRecord, RunInfo
from fedexp.training.exchange import trained_models

log = logging.getLogger("fedexp")


class KeepModels(Callback):
    """Saves the global model and the local models in the folder `models` of the run."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def start(self, info: RunInfo) -> None:
        self.directory = info.directory

    def after_round(self, record: RoundRecord) -> None:
        number = record.round
        if self.settings.keeps_model(number):
            kept_models.save(self.directory, number, record.model)
        if record.result is None or not self.settings.keeps_local_models(number):
            return
        models = trained_models(record.result.exchanges)
        if not models:
            log.warning(
                "keep_local_models: no local models are saved for round %d, because its clients did"
                " not send whole models",
                number,
            )
        for client, model in zip(record.result.cohort.clients, models, strict=False):
            kept_models.save_local(self.directory, number, client, model)
