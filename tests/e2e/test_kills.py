"""A sample of the campaign of kills (`make test-faults` runs all of it)."""

import pytest
from kills import Campaign


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorised", "sweep"])
def test_run_killed_twice_equals_the_undisturbed_one(forks, tmp_path, engine):
    """The moments are random with a fixed seed; test_processes kills workers."""
    campaign = Campaign(forks, tmp_path, seed=1)
    campaign.run({engine: 2}, at_once=2)
    tally = campaign.tallies[engine]
    assert tally.kills == 2
    assert tally.parsed > 10
    assert not tally.broken
    assert not tally.different
