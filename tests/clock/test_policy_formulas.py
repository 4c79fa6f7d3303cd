"""Policies against their papers' definitions, written anew in float64 NumPy."""

import math

import numpy as np

from fedjax_async.clock import POLICIES, Finished, Policy, View, bind_policy, chance
from fedjax_async.clock.oort import _quantile
from tests.clock.test_policies import PRIOR, N


def view(rows=(), losses=None, time=0.0, **more):
    """A view of arrivals ``(client, seconds, loss, rms_loss)``."""
    names = ("client", "seconds", "loss", "rms_loss")
    columns = dict(zip(names, np.array(rows, float).reshape(-1, 4).T))
    columns["client"] = columns["client"].astype(int)
    return View(time, 0, columns | more, {}, losses or (lambda clients: np.zeros(len(clients))))


def test_every_policy_is_tested_here():
    tested = {"uniform", "power_of_choice", "oort", "pisces", "linear", "adaptive_buffer", "adaptive_window"}
    assert set(POLICIES) == tested | {"event_triggered", "true_bytes"}
    assert bind_policy("uniform:every=3")(PRIOR) == Policy(every=3, spec="uniform:every=3")


def test_power_of_choice_takes_the_highest_losses_of_d_candidates_drawn_by_their_examples():
    """Cho et al. (2020): A of d clients drawn without replacement with p_k = B_k / sum B; the m largest F_k(w) of A."""
    losses = np.random.default_rng(0).normal(size=N)
    choose = bind_policy("power_of_choice:d=6")(PRIOR).choose
    rng, idle = chance.generator(PRIOR.seed, "policy"), np.array([2, 3, 5, 7, 11, 13, 17, 19])
    drawn = np.zeros(N)
    for turn in range(2000):
        clients, scores = choose(view(losses=lambda clients: losses[clients]), idle, 2)
        share = PRIOR.examples[idle] / PRIOR.examples[idle].sum()
        candidates = rng.choice(idle, 6, replace=False, p=share)
        want = sorted(candidates, key=lambda client: -losses[client])[:2]
        assert list(clients) == want and list(scores) == [losses[client] for client in want], turn
        drawn[candidates] += 1
    assert (np.diff(drawn[idle]) > -60).all(), "more examples, more often a candidate"
    candidates = chance.generator(PRIOR.seed, "policy").choice(idle, 6, replace=False, p=share)
    for rounding in (0.0, 1e-7):
        alike = view(losses=lambda clients, rounding=rounding: 1.0986 + rounding * clients)
        first = bind_policy("power_of_choice:d=6")(PRIOR).choose(alike, idle, 2).clients
        np.testing.assert_array_equal(first, candidates[:2])
    for bad in (np.nan, np.inf):  # a model that diverged on the examples of the fourth candidate
        losses = np.where(np.arange(N) == candidates[3], bad, 1.0)
        first = bind_policy("power_of_choice:d=6")(PRIOR).choose(view(losses=losses.__getitem__), idle, 2).clients
        np.testing.assert_array_equal(first, candidates[[3, 0]])
    for count, among in ((5, idle), (1, idle[:1])):  # d at least as many as wanted, at most as many as are there
        assert len(choose(view(losses=lambda clients: losses[clients]), among, count).clients) == count


class Oort:
    """Algorithm 1 of Lai et al. (2021) for one client at a time, with T as the documented percentile."""

    def __init__(self, prior, **options):
        self.prior = prior
        vars(self).update(options)
        self.U, self.D, self.L = {}, {}, {}
        self.R, self.history = 0, []

    def feedback(self, client, seconds, squares):
        size = self.prior.examples[client]
        self.U[client], self.D[client] = size * math.sqrt(sum(squares) / size), seconds

    def utility(self, client):
        U = min(self.U[client], float(np.quantile(list(self.U.values()), self.clip)))
        util = U + math.sqrt(0.1 * math.log(self.R) / self.L[client])
        T = float(np.percentile(list(self.D.values()), self.level))
        return util * (T / self.D[client]) ** self.alpha if self.D[client] > T else util

    def begin(self):
        self.R += 1
        done, W = len(self.history), self.window
        if done >= 2 * W and done % W == 0 and sum(self.history[-2 * W : -W]) > sum(self.history[-W:]):
            self.level = min(100.0, self.level + self.pace)

    def pool(self, idle, exploited):
        """Clients with at least c of the utility of the ``exploited``-th best, and the probability of each."""
        util = {client: self.utility(client) for client in idle if client in self.U}
        bar = self.c * sorted(util.values(), reverse=True)[exploited - 1]
        return {client: value for client, value in util.items() if value >= bar}

    def end(self, chosen):
        self.epsilon = max(self.least, self.epsilon * self.decay)
        self.history.append(sum(self.U.get(client, 0.0) for client in chosen))
        self.L.update(dict.fromkeys(chosen, self.R))


OPTIONS = {"alpha": 1.5, "epsilon": 0.6, "decay": 0.9, "least": 0.25, "c": 0.8, "clip": 0.9, "level": 30.0,
           "pace": 15.0, "window": 4}  # fmt: skip
SPEC = "oort:penalty=1.5,exploration=0.6,decay=0.9,least=0.25,cutoff=0.8,clip=0.9,percentile=30,pace=15,window=4"


def test_the_quantiles_of_oort_are_those_of_numpy_bit_for_bit():
    rng = np.random.default_rng(2)
    for share in (0.0, 0.5, 0.95, 1.0, *rng.random(200)):
        values = rng.lognormal(size=rng.integers(1, 30))
        assert _quantile(values, share) == np.quantile(values, share)


def test_oort_is_algorithm_1():
    rng, oort, choose = np.random.default_rng(1), Oort(PRIOR, **OPTIONS), bind_policy(SPEC)(PRIOR).choose
    rows, levels, explored = [], set(), 0
    for turn in range(60):
        idle = np.sort(rng.choice(N, 12, replace=False))
        oort.begin()
        levels.add(oort.level)
        fresh = [client for client in idle.tolist() if client not in oort.U]
        clients, scores = choose(view(rows), idle, 4)
        assert len(set(clients.tolist())) == len(clients) == 4 and set(clients.tolist()) <= set(idle.tolist())
        new = [client for client in clients.tolist() if client in fresh]
        wanted = min(oort.epsilon * 4, len(fresh))
        assert math.floor(wanted) <= len(new) <= math.ceil(wanted) or len(new) == 4 - (len(idle) - len(fresh))
        explored += len(new)
        old = [client for client in clients.tolist() if client not in fresh]
        if old:
            able = oort.pool(idle.tolist(), len(old))
            for client, score in zip(clients.tolist(), scores):
                if client in old:
                    assert client in able, "below the cut-off"
                    np.testing.assert_allclose(score, able[client], rtol=1e-12)
        oort.end(clients.tolist())
        for client in clients.tolist():
            # losses fall, so that the pacer has to act
            squares = rng.exponential(3.0 / (1 + turn), PRIOR.examples[client])
            seconds = float(rng.exponential(2.0))
            oort.feedback(client, seconds, squares.tolist())
            rows.append((client, seconds, 0.0, math.sqrt(squares.mean())))
    assert len(levels) > 1 and explored > 10


def test_oort_draws_by_utility_and_explores_by_speed():
    def often(rows, idle, options, times=800):
        hits = np.zeros(N)
        for seed in range(times):
            choose = bind_policy(f"oort:{options}")(PRIOR._replace(seed=seed)).choose
            hits[choose(view(rows), idle, 1).clients] += 1
        return hits / times

    rows = [(0, 1.0, 0.0, 30.0), (1, 1.0, 0.0, 14.0), (2, 1.0, 0.0, 9.0), (3, 1.0, 0.0, 0.5)]  # utilities 30, 28, 27, 2
    found = often(rows, np.arange(4), "exploration=0,least=0,cutoff=0.8,clip=1")
    np.testing.assert_allclose(found[:4], np.array([30, 28, 27, 0]) / 85, atol=0.05)
    found = often([], np.arange(N), "exploration=1,least=1")
    np.testing.assert_allclose(found, 1 / PRIOR.seconds / (1 / PRIOR.seconds).sum(), atol=0.03)


def test_pisces_takes_the_highest_utilities_discounted_by_staleness():
    """Jiang et al. (2022): U_i = |B_i| sqrt(mean square loss) / (1 + mean of the last five staleness values)^beta."""
    rng, rows, late = np.random.default_rng(2), [], []
    choose = bind_policy("pisces:penalty=0.7,recent=3,exploration=0.5,decay=0.9,least=0.2")(PRIOR).choose
    squares, seen, explored = {}, {}, 0
    for turn in range(60):
        idle, count = np.sort(rng.choice(N, 12, replace=False)).tolist(), int(rng.integers(1, 7))
        clients, scores = choose(view(rows, staleness=np.array(late, int)), np.array(idle), count)
        assert len(set(clients.tolist())) == count and set(clients.tolist()) <= set(idle)
        utility = {}
        for i, values in squares.items():
            size, tau = PRIOR.examples[i], seen[i][-3:]
            quality = size * math.sqrt(sum(values) / size)
            utility[i] = quality / (1 + sum(tau) / len(tau)) ** 0.7
        old = [i for i in clients.tolist() if i in utility]
        assert old == sorted((i for i in idle if i in utility), key=lambda i: -utility[i])[: len(old)], turn
        np.testing.assert_allclose(scores[: len(old)], [utility[i] for i in old], rtol=1e-12)
        assert np.isnan(scores[len(old) :]).all()
        explored += count - len(old)
        for i in clients.tolist():
            squares[i] = rng.exponential(3.0, PRIOR.examples[i]).tolist()
            late.append(int(rng.integers(0, 9)))
            seen.setdefault(i, []).append(late[-1])
            rows.append((i, 1.0, 0.0, math.sqrt(np.mean(squares[i]))))
    assert explored == N, "in the end all are known"


def test_pisces_explores_a_binomial_number_of_new_clients_and_ever_fewer():
    rows = [(i, 1.0, 0.0, 1.0 + i) for i in range(10)]  # ten are known, ten are new
    seen, new, hits = view(rows, staleness=np.zeros(10, int)), np.zeros((4, 800)), np.zeros(N)
    for seed in range(800):
        choose = bind_policy("pisces:exploration=0.8,decay=0.5,least=0.3")(PRIOR._replace(seed=seed)).choose
        for turn in range(4):
            clients = choose(seen, np.arange(N), 5).clients
            new[turn, seed] = (clients >= 10).sum()
            hits[clients] += 1
    share = np.array([0.8, 0.4, 0.3, 0.3])
    np.testing.assert_allclose(new.mean(axis=1), 5 * share, atol=0.15)
    np.testing.assert_allclose(new.var(axis=1), 5 * share * (1 - share), atol=0.15)
    np.testing.assert_allclose(hits[10:] / hits[10:].mean(), 1, atol=0.15)
    choose = bind_policy("pisces:exploration=0,least=0")(PRIOR).choose
    assert sorted(choose(seen, np.array([0, 1, 15, 16]), 4).clients) == [0, 1, 15, 16], "more of the other kind"
    choose = bind_policy("pisces:exploration=1,least=1")(PRIOR).choose
    assert sorted(choose(seen, np.array([0, 1, 15, 16]), 3).clients) == [1, 15, 16]


def test_pisces_draws_among_equal_scores_and_ranks_what_diverged_last():
    rows = [(2, 1.0, 0.0, math.nan), *((i, 1.0, 0.0, (1 + 1e-9 * i) / PRIOR.examples[i]) for i in (3, 4, 5, 6))]
    hits = np.zeros(N)
    for seed in range(400):
        choose = bind_policy("pisces:exploration=0,least=0")(PRIOR._replace(seed=seed)).choose
        hits[choose(view(rows, staleness=np.zeros(5, int)), np.arange(2, 7), 2).clients] += 1
    np.testing.assert_allclose(hits[2:7] / 400, [0, 0.5, 0.5, 0.5, 0.5], atol=0.1)


def test_linear_draws_by_the_softmax_of_its_scores():
    spec = "linear:loss=1.5,speed=-0.5,examples=0.25,age=2,temperature=0.7"
    rows = [(3, 2.0, 0.0, 0.5), (7, 4.0, 0.0, 2.5)]
    idle, hits = np.array([3, 7, 11]), np.zeros(N)
    loss, seconds = np.array([0.5, 2.5, 2.5]), np.array([2.0, 4.0, PRIOR.seconds[11]])
    columns = [np.log(loss), -np.log(seconds), np.log(PRIOR.examples[idle]), np.log([2.0, 2.0, 2.0])]
    score = sum(w * (column - column.mean()) for w, column in zip((1.5, -0.5, 0.25, 2.0), columns))
    for seed in range(1500):
        choose = bind_policy(spec)(PRIOR._replace(seed=seed)).choose
        clients, scores = choose(view(rows), idle, 1)
        np.testing.assert_allclose(scores, score[idle == clients], rtol=1e-12)
        hits[clients] += 1
    want = np.exp(score / 0.7) / np.exp(score / 0.7).sum()
    np.testing.assert_allclose(hits[idle] / 1500, want, atol=0.05)
    cold = bind_policy("linear:temperature=1e-9")(PRIOR).choose
    seen = view([(3, 2.0, 0.0, 0.0), (7, 4.0, 0.0, 2.5), (11, 4.0, 0.0, 0.5)])  # a loss of zero is the last
    clients, scores = cold(seen, idle, 3)
    assert clients[np.argsort(-scores)].tolist() == [7, 11, 3]
    cold = bind_policy("linear:loss=0,age=1,temperature=1e-6")(PRIOR).choose
    assert sorted(np.concatenate([cold(view(), np.arange(N), 4).clients for _ in range(5)])) == list(range(N))


def losing(losses):
    return view([(0, 1.0, loss, 0.0) for loss in losses])


def test_the_adaptive_buffer_is_adasync():
    """Dutta et al. (2021): K = K_0 sqrt(F(w_0) / F(w)), here rounded up, from the first and the last losses."""
    buffer = bind_policy("adaptive_buffer:size=2,most=9,recent=3")(PRIOR).buffer
    losses = [2.0, 2.2, 1.8]
    assert [buffer(losing(losses[:k])) for k in range(4)] == [2] * 4
    for loss in np.linspace(1.9, 0.05, 40):
        losses.append(loss)
        want = min(9, max(2, math.ceil(2 * math.sqrt(np.mean(losses[:3]) / np.mean(losses[-3:])))))
        assert buffer(losing(losses)) == want
    assert want == 9
    assert buffer(losing((np.inf, 1.0, 1.0, 1.0))) == 2
    one = bind_policy("adaptive_buffer:size=2,most=9,recent=1")(PRIOR).buffer
    assert [one(losing((-1.0, last))) for last in (0.5, -0.5, -4.0)] == [2] * 3  # it does not grow from a negative loss
    assert one(losing((1.0, -0.5))) == 9


def test_the_adaptive_window_is_adasync_in_seconds():
    """W = W_0 sqrt(F(w_0) / F(w)), the root in hundredths, from the first and the last losses."""
    window = bind_policy("adaptive_window:length=0.8,most=2.5,recent=3")(PRIOR).window
    slowest = bind_policy("adaptive_window:length=0.8,recent=3")(PRIOR).window
    losses = [2.0, 2.2, 1.8]
    assert [window(losing(losses[:k])) for k in range(4)] == [0.8] * 4
    for loss in np.linspace(3.0, 0.01, 40):
        losses.append(loss)
        root = np.round(np.sqrt(np.mean(losses[:3]) / np.mean(losses[-3:])), 2)
        want = np.clip(0.8 * root, 0.8, [2.5, PRIOR.seconds.max()])
        np.testing.assert_allclose([window(losing(losses)), slowest(losing(losses))], want, rtol=1e-15)
    assert want.tolist() == [2.5, 3.0]
    for last, most in ((np.inf, 0.8), (0.0, 2.5)):
        assert window(losing((1.0, 1.0, 1.0, last, last, last))) == most
    assert bind_policy("adaptive_window:length=5")(PRIOR).window(view()) == 5.0, "no client takes as long"


def test_the_event_trigger_is_the_norm():
    sends = bind_policy("event_triggered:norm=0.5")(PRIOR).sends
    assert [sends(view(), Finished(0, 0, norm, 8)) for norm in (0.0, 0.49, 0.5, 3.0)] == [False, False, True, True]
    assert sends(view(), Finished(0, 0, math.nan, 8)), "the server rejects it, and counts it"
