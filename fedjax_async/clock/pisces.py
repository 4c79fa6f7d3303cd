"""Pisces' choice of clients: those whose losses are high and whose uploads are fresh, with some exploration."""

from __future__ import annotations

import math

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock import chance
from fedjax_async.clock.views import Choice, Policy, PolicyModel, Prior, View


def pisces(
    *,
    penalty: float = 0.5,
    recent: int = 5,
    exploration: float = 0.9,
    decay: float = 0.98,
    least: float = 0.3,
    every: int = 1,
) -> PolicyModel:
    """Clients of high score: number of examples times root mean squared loss, reduced for those that come stale.

    ``U_i = |B_i| sqrt(1/|B_i| sum_k Loss(k)^2) / (1 + tau_i)^penalty`` of a client i that has returned before: its
    examples, their losses under the start model of its last job, and the mean staleness ``tau_i`` of its last
    ``recent`` uploads. Of ``count`` clients, Binomial(count, epsilon) are explored: clients that have not returned
    yet, drawn uniformly, at most as many as there are. The others are those of the highest scores; of equal ones (to
    five digits, as in ``power_of_choice``) random ones. If either kind is too few, more of the other are taken. Epsilon
    starts at ``exploration`` and is multiplied by ``decay`` at each decision, down to ``least``. The scores of explored
    clients are recorded as NaN. The timing ``pace`` keeps staleness within a bound.

    Source: Jiang, Wang, Li, Li (2022), "Pisces: efficient federated learning via guided asynchronous training", in the
    authors' code (``plato/client_managers/sirius.py`` of github.com/SamuelGong/Pisces) with the options of their
    examples (``statistical_only``, without the detection of outliers by their losses). Deviation: the losses are those
    of all of a client's examples under its start model, there a moving average over the batches of its first local
    epoch (of the squares where the loss of each example is known, else of the losses).
    """
    check.real_non_negative("penalty", penalty)
    check.whole("recent", recent)
    for field, value in (("exploration", exploration), ("least", least)):
        check.real_non_negative(field, value)
        check.in_range(field, value, 0, 1)
    check.real_positive("decay", decay)
    check.in_range("decay", decay, 0, 1)
    check.require(least <= exploration, "least", least, f"at most exploration, {exploration}")
    check.whole("every", every)

    def model(prior: Prior) -> Policy:
        clients = _Clients(prior, penalty, recent)
        rng = chance.generator(prior.seed, "policy")
        epsilon = exploration

        def choose(view: View, idle: np.ndarray, count: int) -> Choice:
            nonlocal epsilon
            clients.observe(view)
            tried, fresh = idle[clients.known[idle]], idle[~clients.known[idle]]
            explored, epsilon = min(int(rng.binomial(count, epsilon)), len(fresh)), max(epsilon * decay, least)
            exploited = min(len(tried), count - explored)
            mixed = rng.permutation(tried)  # the sort keeps this order among equal scores
            score = clients.scores(mixed)
            best = np.argsort(-in_five_digits(score), kind="stable")[:exploited]
            new = rng.choice(fresh, min(len(fresh), count - exploited), replace=False)
            return Choice(np.concatenate([mixed[best], new]), np.concatenate([score[best], np.full(len(new), np.nan)]))

        return Policy(choose=choose, loss=True, every=every)

    return model


def in_five_digits(values: np.ndarray) -> np.ndarray:
    """Numbers in the order of ``values``, equal where these agree to five digits of the largest finite one."""
    largest = float(np.max(np.abs(values), where=np.isfinite(values), initial=1e-300))
    rounded: np.ndarray = np.round(values / 10.0 ** (math.floor(math.log10(largest)) - 4))
    return rounded


class _Clients:
    """What was observed of each client: the utility of its last job, and the staleness of its last uploads."""

    def __init__(self, prior: Prior, penalty: float, recent: int) -> None:
        self._examples, self._penalty, self._recent = prior.examples, penalty, recent
        self.known = np.zeros(prior.num_clients, np.bool_)
        self._utility = np.zeros(prior.num_clients)
        self._staleness: list[list[int]] = [[] for _ in range(prior.num_clients)]
        self._seen = 0

    def observe(self, view: View) -> None:
        """Take in the new arrivals."""
        rows = slice(self._seen, len(view.arrivals["client"]))
        client, loss, staleness = (view.arrivals[name][rows] for name in ("client", "rms_loss", "staleness"))
        self._utility[client] = np.where(np.isfinite(loss), self._examples[client] * loss, 0.0)
        self.known[client] = True
        for who, late in zip(client.tolist(), staleness.tolist(), strict=True):
            self._staleness[who] = [*self._staleness[who], late][-self._recent :]
        self._seen = rows.stop

    def scores(self, clients: np.ndarray) -> np.ndarray:
        """``U_i`` of clients that are known; float64."""
        late = np.array([np.mean(self._staleness[who]) for who in clients.tolist()])
        scores: np.ndarray = self._utility[clients] / (1.0 + late) ** self._penalty
        return scores
