"""Optuna: a trial that was begun by another process, or by an earlier command. It has no public way
to it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial


def reopened(study: "Study", number: int) -> "Trial":
    """Return the running trial of this number, which can be told values and whether it is to be
    pruned."""
    from optuna.trial import Trial

    return Trial(study, study.trials[number]._trial_id)
