"""Adaptive runs of the small problem: planned by the clock while an executor trains them."""

from __future__ import annotations

import functools

import numpy as np

from fedjax_async import clock
from fedjax_async.clock import Decisions, Prior, Until, plan
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config.adaptive import in_flight, observed_loss
from fedjax_async.engine import Every
from fedjax_async.engine.components import facts_of
from fedjax_async.engine.outset import OBSERVED, GrowingPoints, Outset
from fedjax_async.local import feedback, local_steps
from fedjax_async.types import Probe
from tests.engine.problem import MODEL, SIZES, client
from tests.engine.problem import personal as personal_case

EVERY, DELAY = Every(updates=5), "lognormal:mean=1,heterogeneity=0.5"
LOOP, VMAP = {"batching": "loop", "max_width": 2, "lanes": 2}, {"batching": "vmap", "max_width": 2, "lanes": 1}
STEPS = local_steps(np.array(SIZES), batch_size=4, epochs=2.0)
PRIOR = Prior(len(SIZES), np.array(SIZES), 1.0 + np.arange(len(SIZES)), STEPS, 3)
FAULTY = {"faults": "drop:probability=0.2+crash:probability=0.1,restart=2+corrupt:probability=0.1"}


def outset_of(given, policy, *, arrive=True, under_way=None):
    """What an adaptive run with the components of the planned run ``given`` knows when it begins."""
    return Outset(
        given.components,
        given.schedule,
        facts_of(given.schedule),
        STEPS,
        given.params,
        given.key,
        GrowingPoints(EVERY, None),
        in_flight(given.schedule) if under_way is None else under_way,
        asks=policy.sends is not None or policy.sizes,
        all_arrive=arrive and policy.sends is None,
        probes={OBSERVED: Probe(observed_loss(MODEL, 32))} if policy.loss else {},
    )


def planned(executor, policy, timing, *, updates=24, delay=DELAY, seed=3, conditions=None):
    """``(schedule, outcome, decisions)`` of a run that is planned while ``executor`` executes it."""
    decisions = Decisions(policy, executor)
    schedule = plan(
        timing, delay, num_clients=len(SIZES), local_steps=STEPS, until=Until(updates=updates), seed=seed,
        bytes_down=1000, bytes_up=1000, decisions=decisions, **(conditions or {}),
    )  # fmt: skip
    return schedule, executor.finish(decisions.record, schedule, True), decisions


def bound_to(policy):
    """The policy of a spec."""
    return clock.bind_policy(policy)(PRIOR) if isinstance(policy, str) else policy


def adaptive(executor, given, timing, policy, *, conditions=None, delay=DELAY, under_way=None, **options):
    """``(schedule, outcome, decisions)`` of an adaptive run with the components of the planned run ``given``."""
    policy = bound_to(policy)
    outset = outset_of(given, policy, arrive=not conditions, under_way=under_way)
    return planned(executor(outset, **options), policy, timing, delay=delay, conditions=conditions)


@functools.cache
def sparse_client():
    """A client whose uploads are compressed; ``topk`` would compile twice as long."""
    return feedback(client(), COMPRESSORS["topk_fast"](ratio=0.3))


def learned(outcome):
    return outcome.params, outcome.scores, outcome.records, outcome.in_vain, outcome.in_vain_records


def personal(timing, **conditions):
    return personal_case(timing, DELAY, every=EVERY, **conditions)
