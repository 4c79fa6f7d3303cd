"""Policies: rules that look at a run while it goes on, and decide what happens next.

A *policy model*, made by the factories in ``POLICIES``, is ``model(prior) -> Policy``. A policy may choose the clients
that train next, the size of the buffer or the length of the window, and whether a client uploads what it has trained.
The timing makes the other decisions, as in a planned run. Specs joined with ``+`` share the decisions:
``oort+true_bytes``.

A policy sees what a server would have seen by then: a :class:`View`. It is a function of its prior, the views and
its own random numbers (seeded by ``prior.seed``), and of nothing else; ``decisions.py`` asks it, in order of virtual
time. ``oort.py`` and ``pisces.py`` are policies with files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_async.base import check, factories, grammar, registry
from fedjax_async.base.spec import naming
from fedjax_async.clock import chance
from fedjax_async.clock.oort import oort
from fedjax_async.clock.pisces import in_five_digits, pisces
from fedjax_async.clock.views import Choice, Policy, PolicyModel, Prior, View


def uniform(*, every: int = 1) -> PolicyModel:
    """Decides nothing: clients are drawn as in a planned run, and what is observed is ignored.

    The run equals the planned one. It measures the cost of the looks.
    """
    _check_every(every)
    return lambda prior: Policy(every=every)


def power_of_choice(*, d: int = 10, every: int = 1) -> PolicyModel:
    """The clients with the highest loss of the current model among `d` candidates.

    The candidates are drawn from the idle clients without replacement, client k with probability proportional to its
    number of examples. Each computes ``F_k(w)``, the mean loss of the current model on its examples. Of two equal
    losses, the candidate that was drawn first is taken. Losses that agree to five digits are equal: rounding differs
    between machines, and must not decide while the model is still zero and all losses are alike.

    Source: Cho, Wang, Joshi (2020), "Client selection in federated learning", pi_pow-d (section 4). Deviation: where
    clients train already, candidates are drawn among the idle ones; asking them takes no virtual time.
    """
    check.whole("d", d)
    _check_every(every)

    def model(prior: Prior) -> Policy:
        check.require(d <= prior.num_clients, "d", d, f"at most {prior.num_clients}, the number of clients")
        rng = chance.generator(prior.seed, "policy")

        def choose(view: View, idle: np.ndarray, count: int) -> Choice:
            weight = prior.examples[idle] / prior.examples[idle].sum()
            asked = rng.choice(idle, min(max(d, count), len(idle)), replace=False, p=weight)
            losses = view.losses(asked)
            values = np.where(np.isfinite(losses), losses, np.inf)  # a loss that is not finite is the highest
            highest = np.argsort(-in_five_digits(values), kind="stable")[:count]
            return Choice(asked[highest], losses[highest])

        return Policy(choose=choose, every=every)

    return model


def linear(
    *,
    loss: float = 1.0,
    speed: float = 0.0,
    examples: float = 0.0,
    age: float = 0.0,
    temperature: float = 0.1,
    every: int = 1,
) -> PolicyModel:
    """Clients drawn by a linear score of what is known of them; its four weights may be learned.

    ``score = loss * log l - speed * log t + examples * log B + age * log(1 + R - L)``: the root of the mean squared
    loss l and the seconds t of the client's last job, its examples B, and the decisions R - L since it was chosen last,
    each minus its mean over the idle clients. A client that never trained has the highest known loss, the seconds that
    are known of its device, and L = 0. Clients are drawn without replacement with probability proportional to
    ``exp(score / temperature)``.
    """
    for field, value in (("loss", loss), ("speed", speed), ("examples", examples), ("age", age)):
        check.require(check.is_real(value), field, value, "a finite number")
    check.real_positive("temperature", temperature)
    _check_every(every)

    def model(prior: Prior) -> Policy:
        rng = chance.generator(prior.seed, "policy")
        losses, seconds = np.full(prior.num_clients, np.nan), prior.seconds.astype(np.float64)
        chosen_at = np.zeros(prior.num_clients)
        seen = decision = 0

        def choose(view: View, idle: np.ndarray, count: int) -> Choice:
            nonlocal seen, decision
            client, rms, took = (view.arrivals[name][seen:] for name in ("client", "rms_loss", "seconds"))
            seen, decision = len(view.arrivals["client"]), decision + 1
            losses[client], seconds[client] = np.where(np.isfinite(rms), np.maximum(rms, 1e-9), np.nan), took
            known = losses[np.isfinite(losses)]
            filled = np.where(np.isfinite(losses), losses, known.max(initial=1e-9))
            features = np.log([filled[idle], 1 / seconds[idle], prior.examples[idle], 1 + decision - chosen_at[idle]])
            score = np.array([loss, speed, examples, age]) @ (features - features.mean(axis=1, keepdims=True))
            drawn = score + temperature * rng.gumbel(size=len(idle))  # Gumbel top-k: the highest ones are such a draw
            best = np.argsort(-drawn, kind="stable")[:count]
            chosen_at[idle[best]] = decision
            return Choice(idle[best], score[best])

        return Policy(choose=choose, loss=True, every=every)

    return model


def adaptive_buffer(*, size: int = 2, most: int | None = None, recent: int = 10, every: int = 1) -> PolicyModel:
    """A buffer that grows as the loss falls: ``K = ceil(K_0 sqrt(F(w_0) / F(w)))``, from `size` to at most `most`.

    ``F(w_0)`` is the mean loss that the first `recent` arrivals report (of their start models, on their clients'
    examples), ``F(w)`` that of the last `recent`. Small buffers make many steps while the gradients are large, large
    ones average the noise at the end. ``most``: by default the number of clients under way.

    Source: AdaSync for K-asynchronous SGD, Dutta, Wang, Joshi (2021), "Slow and stale gradients can win the race",
    section V. Deviation: the losses are those of arrivals, as a server has no loss of all data.
    """
    check.whole("size", size)
    check.optional(check.whole, "most", most)
    _check_growth("size", size, most, recent, every)

    def model(prior: Prior) -> Policy:
        def buffer(view: View) -> int:
            largest = prior.num_clients if most is None else most
            wanted = math.ceil(min(size * _growth(view, recent), largest))
            return int(min(max(wanted, size), largest))

        return Policy(buffer=buffer, every=every, loss=True)

    return model


def adaptive_window(
    *, length: float = 60.0, most: float | None = None, recent: int = 10, every: int = 1
) -> PolicyModel:
    """A window that grows as the loss falls: ``W = W_0 sqrt(F(w_0) / F(w))`` seconds, from `length` to at most `most`.

    ``F(w_0)`` is the mean loss that the first `recent` arrivals report (of their start models, on their clients'
    examples), ``F(w)`` that of the last `recent`. The root is rounded to hundredths: rounding differs between machines,
    and must not decide what still comes within a window. ``most``: by default the mean seconds of the slowest client's
    job, with which a window is about a synchronous round.

    Source: AdaSync for K-asynchronous SGD, Dutta, Wang, Joshi (2021), "Slow and stale gradients can win the race",
    section V. Deviations: seconds in place of the K uploads of a step, since a window of W seconds receives uploads in
    proportion to W while clients return at a constant rate; the losses are those of arrivals.
    """
    check.real_positive("length", length)
    check.optional(check.real_positive, "most", most)
    _check_growth("length", length, most, recent, every)

    def model(prior: Prior) -> Policy:
        longest = max(length, float(prior.seconds.max())) if most is None else most
        return Policy(
            window=lambda view: min(length * max(1.0, round(_growth(view, recent), 2)), longest), every=every, loss=True
        )

    return model


def _growth(view: View, recent: int) -> float:
    """``sqrt(F(w_0) / F(w))``, from the first and the last ``recent`` losses.

    It is 1 while they are not known, or if ``F(w_0)`` is negative: the rule is one for losses >= 0.
    """
    losses = view.arrivals["loss"]
    if len(losses) < recent:
        return 1.0
    start, now = float(np.mean(losses[:recent])), float(np.mean(losses[-recent:]))
    if not math.isfinite(start + now) or start < 0:
        return 1.0
    return math.sqrt(start / now) if now > 0 else math.inf


def event_triggered(*, norm: float) -> PolicyModel:
    """A client uploads only if its update is large enough: ``||w_K - w_0|| >= norm``.

    What it does not upload is lost, except for what its own state keeps: with error feedback, the residual alone that
    the upload would have left. The server learns at the same moment that nothing comes. Its messages to the client
    stay the same, no bytes of an upload are counted, and the job's outcome is ``WITHHELD``.

    An upload that is not finite is sent, and the server rejects it.

    Source: the trigger of SPARQ-SGD, Singh, Data, George, Diggavi (2019), algorithm 1 line 7, with ``c_t eta_t^2 =
    norm^2`` for all t.
    """
    check.real_positive("norm", norm)
    return lambda prior: Policy(sends=lambda view, finished: not finished.norm < norm)


def true_bytes() -> PolicyModel:
    """Uploads take the time of their true bytes: of the compressed message itself, not of the longest possible one."""
    return lambda prior: Policy(sizes=True)


POLICIES: dict[str, Callable[..., PolicyModel]] = {
    "uniform": uniform,
    "power_of_choice": power_of_choice,
    "oort": oort,
    "pisces": pisces,
    "linear": linear,
    "adaptive_buffer": adaptive_buffer,
    "adaptive_window": adaptive_window,
    "event_triggered": event_triggered,
    "true_bytes": true_bytes,
}


def _check_every(every: object) -> None:
    check.whole("every", every)


def _check_growth(name: str, first: float, most: float | None, recent: object, every: object) -> None:
    """Check what the policies that grow from ``first`` to at most ``most`` have in common."""
    check.whole("recent", recent)
    check.require(most is None or most >= first, "most", most, f"at least {first}, the first {name}")
    _check_every(every)


def bind(spec: PolicyModel | str) -> PolicyModel:
    """The policy model that a spec names; ``ValueError`` if two of the policies that it joins decide the same."""
    if not isinstance(spec, str):
        return spec
    parts = grammar.joined(spec)
    check.require(len(parts) == 1 or all(parts), "policy", spec, "names of policies with + between them")
    models = [_named(part, registry.spec("policy", POLICIES, part).make()) for part in parts]
    return models[0] if len(models) == 1 else lambda prior: together(parts, [model(prior) for model in models])


def _named(spec: str, model: PolicyModel) -> PolicyModel:
    """The model of a spec. Errors about its options name the spec; its policy has the spec as ``spec``."""

    def named(prior: Prior) -> Policy:
        with naming("policy", spec, factories.options_of(_factory(spec))):
            policy = model(prior)
        return policy._replace(spec=spec) if isinstance(policy, Policy) else policy

    return named if callable(model) else model


def _factory(spec: str) -> Callable[..., PolicyModel]:
    factory: Callable[..., PolicyModel] = registry.find("policy", POLICIES, spec.partition(":")[0])
    return factory


def together(names: Sequence[str], policies: Sequence[Policy]) -> Policy:
    """One policy that makes the decisions of all of these.

    It looks as often as the policy that looks most often. Only policies that choose clients, size buffers or windows or
    have the option ``every`` count here; the others are asked at every upload and need no look of their own.
    """
    given: dict[str, Any] = {}
    whose: dict[str, str] = {}
    for name, policy in zip(names, policies, strict=True):
        for field in ("choose", "buffer", "window", "sends"):
            if (function := getattr(policy, field)) is not None:
                check.require(field not in whose, "policy", name, f"left out: {whose.get(field)} decides the same")
                given[field], whose[field] = function, name
    looking = [
        policy.every
        for name, policy in zip(names, policies, strict=True)
        if policy.choose or policy.buffer or policy.window or "every" in factories.options_of(_factory(name))
    ]
    return Policy(
        **given,
        sizes=any(policy.sizes for policy in policies),
        loss=any(policy.loss for policy in policies),
        every=min(looking, default=1),
        spec="+".join(names),
    )
