"""Oort: clients whose losses are high and whose jobs are short, with some exploration."""

from __future__ import annotations

import math

import numpy as np

from fedjax_async import check
from fedjax_async.clock import chance
from fedjax_async.clock.views import Choice, Policy, PolicyModel, Prior, View


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
    """Clients of high utility: losses times the square root of their number of examples, divided by their slowness.

    The utility of a client i that has trained before is, at decision R,

    ``Util(i) = (|B_i| sqrt(1/|B_i| sum_k Loss(k)^2) + sqrt(0.1 ln R / L(i))) * (T / t_i)^(penalty [t_i > T])``

    with the losses of its examples under the model that it started its last job from, the decision L(i) that chose it
    last, and the seconds t_i of its last job. The first term is clipped at its quantile `clip`. Of ``count`` clients,
    the share epsilon is explored: clients that never trained, drawn with probability proportional to 1 / seconds.
    The others are drawn by utility among those with at least `cutoff` of the utility of the count-th best one.
    Epsilon starts at `exploration` and is multiplied by `decay` at each decision, down to `least`.

    Pacer: T is the `percentile` of the seconds of known clients. Every `window` decisions, if the utility that was
    collected in the last `window` is below that of the `window` before, the percentile rises by `pace`.

    Source: Lai, Zhu, Madhyastha, Chowdhury (2021), "Oort: Efficient federated learning via guided participant
    selection", algorithm 1 and eq. 1. Deviations: T is a percentile, as in the authors' code, since the paper gives
    no seconds; a decision replaces a round where uploads are applied as they come; a fraction of a client to
    explore is drawn; the clip applies from the second client on.
    """
    check.real_non_negative("penalty", penalty)
    for field, value in (("exploration", exploration), ("least", least), ("cutoff", cutoff), ("clip", clip)):
        check.real_non_negative(field, value)
        check.in_range(field, value, 0, 1)
    check.real_positive("decay", decay)
    check.in_range("decay", decay, 0, 1)
    check.require(least <= exploration, "least", least, f"at most exploration, {exploration}")
    for field, value in (("percentile", percentile), ("pace", pace)):
        check.real_non_negative(field, value)
        check.in_range(field, value, 0, 100)
    check.whole("window", window)
    check.whole("every", every)

    def model(prior: Prior) -> Policy:
        rng = chance.generator(prior.seed, "policy")
        utility, seconds = np.zeros(prior.num_clients), np.zeros(prior.num_clients)
        known = np.zeros(prior.num_clients, np.bool_)
        chosen_at = np.ones(prior.num_clients)  # L(i)
        collected: list[float] = []  # statistical utility of the clients chosen, a decision each
        seen, epsilon, level = 0, exploration, percentile

        def observe(view: View) -> None:
            nonlocal seen
            rows = slice(seen, len(view.arrivals["client"]))
            client, loss, took = (view.arrivals[name][rows] for name in ("client", "rms_loss", "seconds"))
            utility[client] = np.where(np.isfinite(loss), prior.examples[client] * loss, 0.0)
            seconds[client], known[client] = took, True
            seen = rows.stop

        def utilities(clients: np.ndarray, decision: int) -> np.ndarray:
            limit = np.quantile(utility[known], clip)
            value = np.minimum(utility[clients], limit) + np.sqrt(0.1 * math.log(decision) / chosen_at[clients])
            preferred = np.percentile(seconds[known], level)
            slow = seconds[clients] > preferred
            return np.where(slow, value * (preferred / seconds[clients]) ** penalty, value)

        def choose(view: View, idle: np.ndarray, count: int) -> Choice:
            nonlocal epsilon, level
            observe(view)
            decision = len(collected) + 1
            if len(collected) >= 2 * window and len(collected) % window == 0:
                before, after = sum(collected[-2 * window : -window]), sum(collected[-window:])
                level = min(100.0, level + pace) if before > after else level
            tried, fresh = idle[known[idle]], idle[~known[idle]]
            count = min(count, len(idle))
            exact = epsilon * count
            explored = int(exact) + int(rng.random() < exact - int(exact))
            explored = max(min(explored, len(fresh)), count - len(tried))
            epsilon = max(least, epsilon * decay)
            clients, scores = np.zeros(0, np.int64), np.zeros(0)
            if (exploited := count - explored) > 0:
                value = utilities(tried, decision)
                bar = cutoff * np.sort(value)[-exploited]
                able = np.flatnonzero(value >= bar)
                share = value[able] / value[able].sum() if value[able].sum() > 0 else None
                if share is not None and np.count_nonzero(share) < exploited:
                    share = None
                picked = rng.choice(able, exploited, replace=False, p=share)
                clients, scores = tried[picked], value[picked]
            if explored > 0:
                speed = 1 / prior.seconds[fresh]
                new = rng.choice(fresh, explored, replace=False, p=speed / speed.sum())
                clients, scores = np.concatenate([clients, new]), np.concatenate([scores, np.full(explored, np.nan)])
            collected.append(float(utility[clients].sum()))
            chosen_at[clients] = decision
            return Choice(clients, scores)

        return Policy(choose=choose, loss=True, every=every)

    return model
