"""Rules without memory share messages between jobs: those that must not are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fedjax_async.engine import run_reference, run_waves
from fedjax_async.types import Info, Message, ServerAlgorithm
from tests.engine.problem import case, close

pytestmark = pytest.mark.float64


def moving_at_once(remembers: bool) -> ServerAlgorithm:
    """Every arrival moves the params at once, also where a server step has several; no ``close``."""

    def init(params):
        return {"params": params, "seen": jnp.zeros(())}, jnp.zeros(()) if remembers else ()

    def receive(state, memory, arrival):
        moved = jax.tree.map(lambda x, d: x + 0.3 * d, state["params"], arrival.upload)
        return {"params": moved, "seen": state["seen"] + 1}, memory, Info(arrival.weight)

    def dispatch(state, memory, request):
        return Message(state["params"]), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state["params"])


def test_a_rule_whose_messages_change_within_a_step_needs_a_memory():
    def both(rule, timing):
        given = case(rule, timing, "exponential:mean=1", updates=20)
        return run_waves(*given).params, run_reference(*given).params

    for rule, timing in ((moving_at_once(True), "buffer:size=3"), (moving_at_once(False), "every")):
        close(*both(rule, timing), 1e-12)
    with pytest.raises(ValueError, match=r"state\['params'\].* changes in receive and is read by dispatch.*memory"):
        both(moving_at_once(False), "buffer:size=3")
