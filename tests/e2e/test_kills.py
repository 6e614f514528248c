"""A sample of the campaign of kills (`make test-faults` runs all of it)."""

import pytest
from kills import Campaign, campaign


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorised", "distributed", "sweep"])
def test_killed_twice_a_run_ends_as_the_undisturbed_one(forks, tmp_path, engine):
    """Random moments, always the same ones; workers are killed in test_processes."""
    tally = campaign(Campaign(forks, tmp_path, seed=1), {engine: 2}, at_once=2)[engine]
    assert tally.kills == 2
    assert tally.parsed > 10
    assert not tally.broken
    assert not tally.different
