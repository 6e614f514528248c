"""Measure a round of a simulation with the analyses of fedexp_papers."""

from fedexp.trackers.base import RoundRecord
from fedexp.training.rounds import play_round
from fedexp_papers.analyses.base import Measured

EVERY = {"rounds": None, "every": 1}


def measure(simulation, *analyses, state=None):
    """Return the result of the next round, and the rows of each analysis."""
    state = state or simulation.initial_state()
    for each in analyses:
        each.check_run(simulation)
    result = play_round(simulation, state, any(each.reads_epochs for each in analyses))
    record = RoundRecord(result.round, {}, state.records, result=result)
    return result, *(each.rows(Measured(simulation, record)) for each in analyses)
