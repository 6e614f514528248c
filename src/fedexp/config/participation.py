"""Laws of participation: who can take part in a round (config group `cohorts`).

With most laws, only some clients are available in a round, or some are more likely to take part
than others. The cohort is drawn without replacement from the available clients. If fewer clients
are available than `participation` asks for, all of them take part. If none is available, one client
is drawn from all.

All laws draw with seeds.sampling. A cohort depends on the round and on the clients, but not on the
algorithm, so the runs of a comparison have the same cohorts.
"""

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from fedexp.config.cohorts import Clients, Cohorts, Rounds, Size, draw_size
from fedexp.core.errors import require
from fedexp.core.limits import Count, Positive, Share
from fedexp.core.rng import generator_for


class Law(Cohorts):
    """Base class of laws that give each client a weight in each round.

    size: how many of the available clients take part. `fixed`: the number that `participation`
    gives. `binomial`: a number with this mean, drawn anew in each round.
    """

    size: Size = "fixed"

    @abstractmethod
    def weights(self, clients: Clients) -> Iterator[np.ndarray]:
        """Yield the clients' weights in round 1, 2, ..., float [K].

        A client with weight 0 is not available. The probability that the next client of a cohort is
        k is k's share of the weights of the clients that have not been drawn yet.
        """

    def plan(self, clients: Clients) -> Rounds:
        found: Rounds = {}
        for number, weights in enumerate(self.weights(clients), 1):
            rng = generator_for(clients.seed, "cohort", number)
            if not weights.any():
                found[number] = [int(rng.integers(clients.number))]
                continue
            size = min(draw_size(self.size, clients, number), int(np.count_nonzero(weights)))
            shares = weights / weights.sum()
            drawn = rng.choice(clients.number, size, replace=False, p=shares)
            found[number] = sorted(drawn.tolist())
        return found


class RoundRobin(Cohorts):
    """The clients take turns in a random order that is drawn once (cf. DPFL, arXiv 2511.16523).

    With K clients and cohorts of m clients, each client takes part once in every K/m rounds.
    """

    def plan(self, clients: Clients) -> Rounds:
        order = generator_for(clients.seed, "cohort order").permutation(clients.number)
        found: Rounds = {}
        for number in range(1, clients.rounds + 1):
            turns = np.arange((number - 1) * clients.size, number * clients.size)
            found[number] = sorted(order[turns % clients.number].tolist())
        return found


class Cyclic(Law):
    """Groups of clients with similar labels are available in turn.

    The clients are sorted by their most frequent class and divided into groups of equal size. Group
    1 is available for `period` rounds, then group 2, and so on (Cho et al., ICML 2023, call this
    cyclic client participation; their groups are not chosen by label).
    """

    groups: Count = 2
    period: Count = 1

    def weights(self, clients: Clients) -> Iterator[np.ndarray]:
        good = self.groups * clients.size <= clients.number
        most = clients.number // clients.size
        wanted = f"at most {most}, so that each group has a cohort of {clients.size} clients"
        require(good, "cohorts.groups", self.groups, wanted)
        order = np.argsort(clients.counts.argmax(1), kind="stable")
        groups = np.array_split(order, self.groups)
        for number in range(clients.rounds):
            available = np.zeros(clients.number)
            available[groups[number // self.period % self.groups]] = 1
            yield available


class Markov(Law):
    """Each client is available or not, and changes its state at random after each round.

    An available client stays available with probability `stay_available`, and an unavailable one
    stays unavailable with probability `stay_away`. In round 1, a client is available with
    probability 1/2, as in the released code of DPFL (arXiv 2511.16523), whose probabilities are
    both 0.8 and in which all available clients take part (`participation=1`).
    """

    stay_available: Share = 0.8
    stay_away: Share = 0.8

    def weights(self, clients: Clients) -> Iterator[np.ndarray]:
        available = np.zeros(clients.number, dtype=bool)
        for number in range(1, clients.rounds + 1):
            draw = generator_for(clients.seed, "availability", number).random(clients.number)
            if number == 1:
                available = draw < 0.5
            else:
                available = np.where(available, draw < self.stay_available, draw >= self.stay_away)
            yield available.astype(float)


class Windows(Law):
    """Clients arrive late and leave early.

    late: fraction of the clients that arrive in a round drawn uniformly from all rounds. The others
    are available from round 1 on.
    early: fraction of the clients that leave after a round drawn uniformly from the rounds since
    their arrival. The others stay until the end. Both fractions are drawn independently.
    """

    late: Share = 0.5
    early: Share = 0.5

    def weights(self, clients: Clients) -> Iterator[np.ndarray]:
        rng = generator_for(clients.seed, "windows")
        first = np.ones(clients.number, dtype=int)
        last = np.full(clients.number, clients.rounds)
        late = rng.permutation(clients.number)[: round(self.late * clients.number)]
        first[late] = rng.integers(1, clients.rounds + 1, len(late))
        early = rng.permutation(clients.number)[: round(self.early * clients.number)]
        last[early] = rng.integers(first[early], clients.rounds + 1)
        for number in range(1, clients.rounds + 1):
            yield ((first <= number) & (number <= last)).astype(float)


class PowerLaw(Law):
    """Some clients take part far more often than others.

    The clients are ranked at random, and the client of rank i has the weight i^(-exponent).
    """

    exponent: Positive = 1.0

    def weights(self, clients: Clients) -> Iterator[np.ndarray]:
        ranks = generator_for(clients.seed, "cohort order").permutation(clients.number) + 1
        found = ranks.astype(float) ** -self.exponent
        words = f"smaller, because {clients.number}^(-exponent), the smallest weight, rounds to 0"
        require(bool(found.all()), "cohorts.exponent", self.exponent, words)
        for _ in range(clients.rounds):
            yield found
