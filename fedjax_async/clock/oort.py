"""Oort: clients whose losses are high and whose jobs are short, with some exploration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock import chance
from fedjax_async.clock.views import Choice, Policy, PolicyModel, Prior, View


def _paced(level: float, pace: float, collected: Sequence[float], window: int) -> float:
    """The percentile of the seconds, higher by ``pace`` where the last ``window`` decisions collected less utility."""
    if len(collected) < 2 * window or len(collected) % window:
        return level
    before, after = sum(collected[-2 * window : -window]), sum(collected[-window:])
    return min(100.0, level + pace) if before > after else level


def oort(
    *,
    penalty: float = 2.0,
    exploration: float = 0.9,
    decay: float = 0.98,
    least: float = 0.2,
    cutoff: float = 0.95,
    clip: float = 0.95,
    percentile: float = 30.0,
    pace: float = 10.0,
    window: int = 20,
    every: int = 1,
) -> PolicyModel:
    """Clients of high utility: number of examples times root mean squared loss, reduced for slow clients.

    The utility of a client i that has trained before is, at decision R,

    ``Util(i) = (|B_i| sqrt(1/|B_i| sum_k Loss(k)^2) + sqrt(0.1 ln R / L(i))) * (T / t_i)^(penalty [t_i > T])``

    with the losses of its examples under the start model of its last job, the last decision L(i) that chose it, and the
    seconds t_i of its last job. The first term is clipped at its quantile `clip`. Of ``count`` clients,
    the share epsilon is explored: clients that never trained, drawn with probability proportional to 1 / seconds.
    The others are drawn by utility among those with at least `cutoff` of the utility of the count-th best one.
    Epsilon starts at `exploration` and is multiplied by `decay` at each decision, down to `least`.

    Pacer: T is the `percentile` of the seconds of known clients. Every `window` decisions, if the utility that was
    collected in the last `window` is below that of the `window` before, the percentile rises by `pace`.

    Source: Lai, Zhu, Madhyastha, Chowdhury (2021), "Oort: Efficient federated learning via guided participant
    selection", algorithm 1 and eq. 1. Deviations: T is a percentile, as in the authors' code, since the paper gives
    no seconds; a decision replaces a round where uploads are applied as they come; a fractional number of
    clients to explore is rounded at random; the clip applies from the second client on. The first term is that of
    eq. 1; the authors' code scales it to [0, 1], so that the second weighs more there.
    """
    check.real_non_negative("penalty", penalty)
    for field, value in (("exploration", exploration), ("least", least), ("cutoff", cutoff), ("clip", clip)):
        check.share(field, value)
    check.real_positive("decay", decay)
    check.in_range("decay", decay, 0, 1)
    check.require(least <= exploration, "least", least, f"at most exploration, {exploration}")
    for field, value in (("percentile", percentile), ("pace", pace)):
        check.real_non_negative(field, value)
        check.in_range(field, value, 0, 100)
    check.whole("window", window)
    check.whole("every", every)

    fractions = (exploration, decay, least)

    def model(prior: Prior) -> Policy:
        clients = _Clients(prior, penalty, clip)
        rng = chance.generator(prior.seed, "policy")
        collected: list[float] = []  # statistical utility of the chosen clients, one entry per decision
        epsilon, level = fractions[0], percentile

        def choose(view: View, idle: np.ndarray, count: int) -> Choice:
            nonlocal epsilon, level
            clients.observe(view)
            decision, level = len(collected) + 1, _paced(level, pace, collected, window)
            tried, fresh = idle[clients.known[idle]], idle[~clients.known[idle]]
            exact, epsilon = epsilon * count, max(least, epsilon * decay)
            explored = int(exact) + int(rng.random() < exact - int(exact))
            explored = max(min(explored, len(fresh)), count - len(tried))
            chosen, scores = np.zeros(0, np.int64), np.zeros(0)
            if count > explored:
                value = clients.utilities(tried, decision, level)
                picked = _by_utility(rng, value, count - explored, cutoff)
                chosen, scores = tried[picked], value[picked]
            if explored > 0:
                speed = 1 / prior.seconds[fresh]
                new = rng.choice(fresh, explored, replace=False, p=speed / speed.sum())
                chosen, scores = np.concatenate([chosen, new]), np.concatenate([scores, np.full(explored, np.nan)])
            collected.append(float(clients.utility[chosen].sum()))
            clients.chosen_at[chosen] = decision
            return Choice(chosen, scores)

        return Policy(choose=choose, loss=True, every=every)

    return model


class _Clients:
    """What was observed of each client: statistical utility, seconds of its last job, and when it was chosen."""

    def __init__(self, prior: Prior, penalty: float, clip: float) -> None:
        self._examples, self._penalty, self._clip = prior.examples, penalty, clip
        self.utility, self._seconds = np.zeros(prior.num_clients), np.zeros(prior.num_clients)
        self.known = np.zeros(prior.num_clients, np.bool_)
        self.chosen_at = np.ones(prior.num_clients)  # L(i)
        self._seen = 0

    def observe(self, view: View) -> None:
        """Take in the new arrivals."""
        rows = slice(self._seen, len(view.arrivals["client"]))
        client, loss, took = (view.arrivals[name][rows] for name in ("client", "rms_loss", "seconds"))
        self.utility[client] = np.where(np.isfinite(loss), self._examples[client] * loss, 0.0)
        self._seconds[client], self.known[client] = took, True
        self._seen = rows.stop

    def utilities(self, clients: np.ndarray, decision: int, level: float) -> np.ndarray:
        """Util(i) of clients that are known; ``level``: the percentile of the preferred seconds T."""
        limit = _quantile(self.utility[self.known], self._clip)
        value = np.minimum(self.utility[clients], limit)
        value = value + np.sqrt(0.1 * math.log(decision) / self.chosen_at[clients])
        seconds, preferred = self._seconds[clients], _quantile(self._seconds[self.known], level / 100)
        slow: np.ndarray = np.where(seconds > preferred, value * (preferred / seconds) ** self._penalty, value)
        return slow


def _quantile(values: np.ndarray, share: float) -> float:
    """``np.quantile(values, share)``, bit for bit; its checks take ten times as long as to sort some hundred values."""
    ordered = np.sort(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    before, after, part = float(ordered[low]), float(ordered[min(low + 1, len(ordered) - 1)]), at - low
    step = after - before
    return before + step * part if part < 0.5 else after - step * (1 - part)


def _by_utility(rng: np.random.Generator, value: np.ndarray, count: int, cutoff: float) -> np.ndarray:
    """``count`` indices drawn with probability proportional to ``value``, of values near the count-th best one."""
    able = np.flatnonzero(value >= cutoff * np.sort(value)[-count])
    total = value[able].sum()
    enough = total > 0 and np.count_nonzero(value[able]) >= count
    return rng.choice(able, count, replace=False, p=value[able] / total if enough else None)
