"""Whether a run's clients can take in a second message in mid-job, where its timing sends one."""

from __future__ import annotations

import jax

from fedjax_async.base import check
from fedjax_async.config.prepared import Resolved
from fedjax_async.engine.components import bound
from fedjax_async.local import MidJob


def check_going_on(run: Resolved) -> None:
    """``ValueError`` unless the clients go on from the first part of a job, as its timing (``midway``) needs."""
    s, client = run.settings, bound(run.components.client, run.components.hyper)
    kept = jax.eval_shape(client.init, run.shapes)
    nodes = jax.tree.leaves(kept, is_leaf=lambda node: isinstance(node, MidJob))
    goes_on = any(isinstance(node, MidJob) for node in nodes)
    why = f"its clients keep no unfinished model: give client=local.going_on_training (given: method {s.method})"
    check.require(goes_on, "timing", "midway", f"another one: {why}")
    feedback = s.compress is not None and s.feedback == "ef"
    why = "with timing midway: the first part of a job is not sent, and has no error to feed back"
    check.require(not feedback, "feedback", s.feedback, f"off or ef21 {why}")
