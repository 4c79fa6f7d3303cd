"""Rules, clients and nodes that check what their functions return, for the trial of a job before a run.

Nothing is compiled: the trial is traced with abstract values. Every error is a ``ValueError`` that names the function,
what it returned and what it must return (``types.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import jax
import numpy as np

from fedjax_async.base import check
from fedjax_async.config import own
from fedjax_async.config.contracts import alike, check_columns, fits, is_array, is_scalar, pair, returned, shown
from fedjax_async.config.prepared import Resolved
from fedjax_async.config.settings import Settings
from fedjax_async.engine import trial
from fedjax_async.engine.components import Client, Components, Hyper, Peer, Server, bound
from fedjax_async.local import MidJob
from fedjax_async.peers import PeerAlgorithm
from fedjax_async.server import begun
from fedjax_async.types import (
    Array,
    Arrival,
    ClientAlgorithm,
    ClientData,
    Event,
    Facts,
    Info,
    Key,
    Message,
    Params,
    Request,
    ServerAlgorithm,
    State,
)

# --- the trial of a run -----------------------------------------------------------------------------


def sent_by_own(s: Settings, components: Components, params: Params) -> tuple[Message, State]:
    """As ``engine.trial.sent``; the rule or the client, one of the user's own, is checked through a whole job."""
    note = f"; the clients of {s.method} itself upload what it takes: leave out client"
    note = "" if s.client is None or own.is_own(s, "method") else note
    _fits_server(components.rule, dict(components.hyper))
    found: tuple[Message, State] = trial.shapes_of(_job, components, params, note)
    return found


def sent_by_nodes(components: Components, params: Params) -> tuple[State, Mapping[str, Array]]:
    """Shapes of one message of a node, and of what it records about an event.

    ``ValueError`` naming the function of ``PeerAlgorithm`` that is wrong.
    """
    returned("method.rule", _FAMILY, bound, components.rule, dict(components.hyper))  # raises for wrong values
    found: tuple[State, Mapping[str, Array]] = trial.shapes_of(_event, components, params)
    return found


def _job(
    server: Server,
    client: Client,
    facts: Facts,
    note: str,
    hyper: Hyper,
    params: Params,
    key: Key,
    pool: tuple[Array, Array],
) -> tuple[Message, State]:
    """``note``: on wrong uploads."""
    rule = checked_rule(_fits_server(server, hyper), params, note)
    found = trial.job(rule, checked_client(bound(client, hyper), params), params, key, pool, facts, steps=1)
    trial.arrived(rule, found)
    return found.message, found.upload


def _event(
    peer: Peer, client: Client, facts: Facts, hyper: Hyper, params: Params, key: Key, pool: tuple[Array, Array]
) -> tuple[State, State]:
    del facts
    node = returned("method.rule", _FAMILY, bound, peer, hyper)
    fits(isinstance(node, PeerAlgorithm), "method.rule", node, "a PeerAlgorithm")
    return trial.event(checked_node(node, params), bound(client, hyper), params, key, pool)


# --- a rule with a server -----------------------------------------------------------------------------


def _fits_server(server: Server, hyper: Hyper) -> ServerAlgorithm:
    made = returned("method.rule", "a factory of a ServerAlgorithm", bound, server, hyper)
    nodes = " (of nodes without a server: a factory f(stays, *, ...))" if isinstance(made, PeerAlgorithm) else ""
    fits(isinstance(made, ServerAlgorithm), "method.rule", made, f"a ServerAlgorithm{nodes}")
    return made


def checked_rule(rule: ServerAlgorithm, params: Params, note: str = "") -> ServerAlgorithm:
    """The rule, checked at each call; ``params``: those of the model, or their shapes; ``note``: on wrong uploads."""

    def init(params: Params, facts: Facts = Facts()) -> tuple[State, State]:
        found = returned("method.init", "init(params[, facts])", begun, rule, params, facts)
        return pair("method.init", found, "(state, memory)")

    def dispatch(state: State, memory: State, request: Request) -> tuple[Message, State]:
        part, kind = "method.dispatch", "(Message, memory)"
        found = returned(part, "dispatch(state, memory, request)", rule.dispatch, state, memory, request)
        message, after = pair(part, found, kind)
        fits(isinstance(message, Message), part, message, kind)
        alike(f"{part}'s Message.params", message.params, params, "params")
        alike(f"{part}'s memory", after, memory, "memory")
        return message, after

    def receive(state: State, memory: State, arrival: Arrival) -> tuple[State, State, Info]:
        part, kind = "method.receive", "(state, memory, Info)"
        uploads = f"the client uploads {shown(arrival.upload)}{note}"
        contract = f"receive(state, memory, arrival) -> {kind}"
        found = returned(part, contract, rule.receive, state, memory, arrival, note=uploads)
        fits(isinstance(found, tuple) and len(found) == 3, part, found, kind)
        fits(isinstance(found[2], Info), part, found[2], f"{kind}; the third is not an Info")
        alike(f"{part}'s state", found[0], state, "state")
        alike(f"{part}'s memory", found[1], memory, "memory")
        fits(is_scalar(found[2].weight), f"{part}'s Info.weight", found[2].weight, "a number")
        check_columns(f"{part}'s Info.columns", found[2].columns)
        return found

    def close(state: State, memory: State) -> tuple[State, State]:
        part, kind, function = "method.close", "(state, memory)", cast(Callable[..., object], rule.close)
        found = pair(part, returned(part, f"close(state, memory) -> {kind}", function, state, memory), kind)
        alike(f"{part}'s state", found[0], state, "state")
        alike(f"{part}'s memory", found[1], memory, "memory")
        return found

    def params_of(state: State) -> Params:
        found = returned("method.params", "params(state) -> params", rule.params, state)
        alike("method.params", found, params, "params")
        return found

    closes = None if rule.close is None else close
    return rule._replace(init=init, dispatch=dispatch, receive=receive, close=closes, params=params_of)


# --- a client -----------------------------------------------------------------------------------------


def checked_client(client: ClientAlgorithm, params: Params) -> ClientAlgorithm:
    """The client, checked at each call; its optional functions are tried when a job ends."""
    fits(isinstance(client, ClientAlgorithm), "client", client, "a ClientAlgorithm")

    def init(params: Params) -> State:
        return returned("client.init", "init(params) -> state", client.init, params)

    def begin(key: Key, message: Message, state: State, data: ClientData) -> State:
        kind = "begin(key, message, state, data) -> work"
        note = f"{_kept(state)}; {_extra(message)}"
        return returned("client.begin", kind, client.begin, key, message, state, data, note=note)

    def step(work: State, k: Array, message: Message, data: ClientData) -> State:
        kind = "step(work, k, message, data) -> work"
        stepped = returned("client.step", kind, client.step, work, k, message, data, note=_extra(message))
        alike("client.step", stepped, work, "work")
        return stepped

    def finish(work: State, message: Message, state: State) -> tuple[State, State]:
        part, kind = "client.finish", "(upload, state)"
        note = f"{_kept(state)}; {_extra(message)}; message.local_steps is missing in finish"
        contract = f"finish(work, message, state) -> {kind}"
        found = returned(part, contract, client.finish, work, message, state, note=note)
        upload, after = pair(part, found, kind)
        fits(all(map(is_array, jax.tree.leaves(upload))), part, upload, "an upload of arrays")
        alike(f"{part}'s state", after, state, "state", _kept(state))
        _try_optional(client, message, state, after, params)
        return upload, after

    return client._replace(init=init, begin=begin, step=step, finish=finish)


def _kept(state: object) -> str:
    return f"client.init returned {shown(state)}"


def _extra(message: Message) -> str:
    return f"this rule sends message.extra = {shown(message.extra)}"


def _try_optional(client: ClientAlgorithm, message: Message, state: State, after: State, params: Params) -> None:
    """Check the functions that a client may have."""
    note = _kept(state)
    if client.info is not None:
        found = returned("client.info", "info(state) -> {name: number}", client.info, state, note=note)
        check_columns("client.info", found)
    if client.gradients is not None:
        one = np.ones(1, np.int64)
        kind = "gradients(local_steps, examples) -> whole numbers like local_steps"
        counts = returned("client.gradients", kind, client.gradients, one, one)
        whole = isinstance(counts, np.ndarray) and counts.shape == (1,) and np.issubdtype(counts.dtype, np.integer)
        fits(whole, "client.gradients", counts, kind)
    if client.unsent is not None:
        kept = returned("client.unsent", "unsent(before, after) -> state", client.unsent, state, after, note=note)
        alike("client.unsent", kept, state, "state", note)
    if client.own is not None:
        model = returned("client.own", "own(message, state) -> params", client.own, message, state, note=note)
        alike("client.own", model, params, "params")


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


# --- a node without a server ----------------------------------------------------------------------------

_FAMILY = "a factory of a PeerAlgorithm"


def checked_node(node: PeerAlgorithm, params: Params) -> PeerAlgorithm:
    """The node, checked at each call; ``params``: those of the model, or their shapes."""

    def init(params: Params) -> State:
        return returned("peer.init", "init(params) -> row", node.init, params)

    def opened(row: State) -> State:
        return returned("peer.open", "open(row) -> inbox", node.open, row)

    def wake(row: State, inbox: State, event: Event) -> State:
        after = returned("peer.wake", "wake(row, inbox, event) -> row", node.wake, row, inbox, event)
        alike("peer.wake", after, row, "a row", "as peer.init")
        return after

    def params_of(row: State) -> Params:
        model = returned("peer.params", "params(row) -> params", node.params, row)
        alike("peer.params", model, params, "params", "as the model's")
        return model

    def start(row: State) -> Message:
        message = returned("peer.start", "start(row) -> Message", node.start, row)
        fits(isinstance(message, Message), "peer.start", message, "a Message")
        return message

    def push(row: State, upload: State, event: Event) -> tuple[State, State, Mapping[str, Array]]:
        contract = "push(row, upload, event) -> (row, messages, columns)"
        pushed = returned("peer.push", contract, node.push, row, upload, event)
        fits(isinstance(pushed, tuple) and len(pushed) == 3, "peer.push", pushed, "(row, messages, columns)")
        after, messages, columns = pushed
        alike("peer.push's row", after, row, "a row", "as peer.init")
        leaves = jax.tree.leaves(messages)
        good = bool(leaves) and all(is_array(leaf) and leaf.shape[:1] == (node.fragments,) for leaf in leaves)
        fits(good, "peer.push's messages", messages, f"arrays [F, ...], F = {node.fragments} fragments")
        scalars = isinstance(columns, Mapping) and all(is_array(v) and v.shape == () for v in columns.values())
        fits(scalars, "peer.push's columns", columns, "columns, a mapping, name -> scalar")
        return pushed

    def add(inbox: State, row: State, message: State, weight: Array) -> State:
        contract = "add(inbox, row, message, weight) -> inbox"
        after = returned("peer.add", contract, node.add, inbox, row, message, weight)
        alike("peer.add", after, inbox, "an inbox")
        return after

    return node._replace(init=init, open=opened, wake=wake, params=params_of, start=start, push=push, add=add)
