"""A server rule of this package as a strategy of Flower: ``strategy("fedadam", clients=10, rounds=5)``.

Needs the extra ``flower`` (``flwr`` from 1.42 on, with its ``serverapp`` strategies). Flower samples the nodes, sends
the model and collects the trained ones, in a simulation or on devices; the rule turns them into the next model.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, lazy, registry, tree
from fedjax_async.base.method import Method, factory_of
from fedjax_async.base.spec import made
from fedjax_async.clock import TIMINGS
from fedjax_async.config.methods import local_options, method_of, rule_spec
from fedjax_async.local import local_training
from fedjax_async.server import begun, check_capacity, closed
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State

LOCAL_STEPS = "local-steps"  # the metric of a reply that rules such as FedNova read


def strategy(method: str, *, clients: int, rounds: int, **options: object) -> Any:
    """A ``flwr.serverapp.strategy.Strategy`` whose server step is the rule of ``method``.

    Flower's rounds are synchronous: all nodes of a round start from one model, and the round waits for all of them. The
    method's timing says when server steps close: ``cohort`` once per round; ``every`` at each reply, in the order of
    the replies; ``buffer:size=K`` at every K-th reply, across rounds. The staleness of a reply is the number of steps
    that earlier replies of its round closed. A reply that is not finite is rejected.

    Args:
      method: as in a run, such as ``"fedbuff+swa@buffer:size=5"``. Its clients must need only the model: methods with
        their own local training, messages or compression (SCAFFOLD, FedDyn, AsyncCurve...) are refused. A proximal
        weight is sent to the clients as ``proximal-mu``, as in Flower's own FedProx.
      clients: the largest number of nodes that take part in the run.
      rounds: rounds of the whole run; schedules of the rule depend on it.
      options: of ``flwr.serverapp.strategy.FedAvg``: ``fraction_train``, ``min_available_nodes`` and others.

    The metrics of a reply must hold ``num-examples`` (``weighted_by_key``), and for rules that read it (FedNova)
    ``local-steps``, K of the job. Integer arrays, such as BatchNorm's counts, are taken from the newest reply. Round 1
    starts the rule again.

    Raises: ``ValueError`` naming what cannot be used, and if Flower is not installed; during a run, for a rule whose
    buffer (the option ``size`` of FedMedian, Krum...) holds fewer replies than a step may have, for a reply of a node
    that was sent no model, and for a reply with arrays or metrics that do not fit.
    """
    check.whole("clients", clients)
    check.whole("rounds", rounds)
    chosen = method_of(method)
    size = _closes_after(method, chosen)
    FedAvg = lazy.optional("flwr.serverapp.strategy", "strategies of Flower", "flwr[simulation]").FedAvg
    facts = facts_of(clients, rounds, size, nodes_of_a_round(clients, FedAvg, options))
    rule = Rounds(made(rule_spec(chosen)), facts, size, method)
    return _strategy(rule, float(chosen.proximal), options)


def _closes_after(method: str, chosen: Method) -> int | None:
    """Replies per server step; None: all of a round. ``ValueError`` for a method that Flower's rounds cannot run."""
    plain = factory_of(chosen.client) is local_training and not local_options(method) and chosen.compress is None
    check.require(plain, "method", method, "one whose clients train by themselves and upload the whole model")
    check.require(chosen.policy is None, "method", method, "one without a policy: Flower chooses the nodes of a round")
    timing = registry.spec("timing", TIMINGS, str(chosen.timing))
    timing.make()  # checks the ranges
    closing = {"every": 1, "buffer": timing.options.get("size"), "cohort": None}
    check.one_of("timing of the method", timing.name, closing)
    return closing[timing.name]


def nodes_of_a_round(clients: int, base: Callable[..., object], options: Mapping[str, object]) -> int:
    """The most nodes that Flower samples for a round; ``base`` has the defaults of the options."""
    known = {name: parameter.default for name, parameter in inspect.signature(base).parameters.items()}
    for name in options:
        check.one_of("option of strategy", name, known)
    given = {**known, **options}
    share, least = given["fraction_train"], given["min_train_nodes"]
    check.require(check.is_real(share) and 0 < share <= 1, "fraction_train", share, "above 0 and at most 1")
    check.whole("min_train_nodes", least, high=clients)
    return max(int(clients * share), least)


def facts_of(clients: int, rounds: int, size: int | None, nodes: int) -> Facts:
    """The facts of a run with ``nodes`` replies per round; ``ValueError`` if no server step ever closes."""
    updates = nodes * rounds
    allowed = f"at most the {updates} replies of the run (it would never fill)"
    check.require(size is None or size <= updates, "size", size, allowed)
    return Facts(clients, size == 1, updates, rounds if size is None else updates // size)


NamedArrays = Mapping[str, np.ndarray]


class Rounds:
    """The state of a rule between rounds: the server's, its memory of each node, and the models sent."""

    def __init__(self, rule: ServerAlgorithm, facts: Facts, size: int | None, method: str) -> None:
        self.rule, self.facts, self.size, self.method = rule, facts, size, method
        self.state: State = None
        self.receive, self.dispatch = jax.jit(rule.receive), jax.jit(rule.dispatch)
        self.close = jax.jit(lambda state, memory: closed(rule, state, memory))

    def begin(self, arrays: NamedArrays) -> None:
        """Start again from these arrays.

        ``ValueError`` for a rule that sends clients more than a model, or cannot take steps of so many replies.
        """
        self.layout = layout_of(arrays)
        self.dtypes = {name: array.dtype for name, array in arrays.items()}
        self.memory: dict[int, State] = {}
        self.numbers: dict[int, int] = {}  # node id -> number of the client
        self.sent: dict[int, tuple[Params, int]] = {}  # node id -> the model it got, server steps closed before
        self.steps = self.waiting = self.replies = 0
        self.fixed: dict[str, np.ndarray] = {}  # arrays of whole numbers
        params = self._params(arrays)
        longest = self.size or int(self.facts.updates) // max(int(self.facts.server_steps), 1)
        begun(self.rule, params, dataclasses.replace(self.facts, longest_step=longest))  # may refuse steps so short
        self.state, self.blank = begun(self.rule, params, self.facts)
        check_capacity(self.state, longest)
        self._check_rule()

    def _check_rule(self) -> None:
        message, _ = jax.eval_shape(self.rule.dispatch, self.state, self.blank, Request())
        extra = len(jax.tree.leaves(message.extra))
        allowed = f"one that sends the model alone, not {extra} arrays beside it"
        check.require(extra == 0, "method", self.method, allowed)

        def sent(steps: Array, weight: Array, state: State, memory: State) -> tuple[Message, State]:
            return self.rule.dispatch(state, memory, Request(local_steps=steps, weight=weight))

        numbers = jnp.int32(1), jnp.float32(1)
        work = any(tree.leaves_read(sent, *numbers, self.state, self.blank)[:2])
        check.require(
            not work,
            "method",
            self.method,
            "one with messages that do not depend on the steps or weights of their jobs",
        )

        def received(steps: Array, start: Params, state: State, memory: State) -> tuple[State, State, Info]:
            zero = jnp.int32(0)
            upload = jax.tree.map(jnp.zeros_like, start)
            known: dict[str, Any] = {"local_steps": steps, "key": self._key()}
            arrival = Arrival(upload, start, zero, numbers[1], zero, jnp.float32(0), jnp.bool_(True), **known)
            return self.rule.receive(state, memory, arrival)

        self.reads_steps = tree.leaves_read(received, numbers[0], message.params, self.state, self.blank)[0]

    def _params(self, arrays: NamedArrays) -> Params:
        """The arrays of floats; arrays of whole numbers are kept unchanged in ``fixed``."""
        whole = {name: a for name, a in arrays.items() if _kind(a) != "floats"}
        self.fixed |= whole
        return {name: jnp.asarray(a) for name, a in arrays.items() if name not in whole}

    def _arrays(self, params: Params) -> dict[str, np.ndarray]:
        floats = {name: np.asarray(array).astype(self.dtypes[name]) for name, array in params.items()}
        return {name: floats[name] if name in floats else self.fixed[name] for name in self.dtypes}

    @property
    def model(self) -> dict[str, np.ndarray]:
        """The server's model."""
        return self._arrays(self.rule.params(self.state))

    def _key(self) -> Array:
        """The random key of the next reply, for rules that draw."""
        return jax.random.fold_in(jax.random.key(0), self.replies)

    def message(self, node: int, now: int) -> dict[str, np.ndarray]:
        """The model for ``node`` in round ``now``; ``ValueError`` for more nodes than clients."""
        number = self.numbers.setdefault(node, len(self.numbers))
        clients = self.facts.num_clients
        allowed = f"at most {clients}, as strategy(clients=...) says"
        check.require(number < clients, "nodes", len(self.numbers), allowed)
        request = Request(np.int32(number), np.float32(now), np.int32(self.steps), np.int32(1), np.float32(1))
        message, self.memory[node] = self.dispatch(self.state, self.memory.get(node, self.blank), request)
        self.sent[node] = (message.params, self.steps)
        return self._arrays(message.params)

    def reply(self, node: int, arrays: NamedArrays, weight: Any, now: int, last: bool, local_steps: Any = None) -> None:
        """Receive a node's trained model; ``last``: it is the last reply of round ``now``."""
        where, waited_for = f"reply of node {node}", sorted(self.sent)
        check.require(node in self.sent, "node of a reply", node, f"one that was sent a model, once: {waited_for}")
        layout = layout_of(arrays)
        check.require(layout == self.layout, f"{where}: arrays", layout, check.shown(self.layout))
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and not weight < 0
        check.require(number, f"{where}: weight", weight, "a number >= 0, in the metrics")
        if self.reads_steps:
            check.whole(f"{where}: metric {LOCAL_STEPS}", local_steps, high=2**31 - 1)
        start, version = self.sent.pop(node)
        upload = jax.tree.map(jnp.subtract, self._params(arrays), start)
        accepted = bool(tree.is_finite(upload)) and 0 < weight < np.inf
        upload = upload if accepted else jax.tree.map(jnp.zeros_like, upload)
        self.waiting += 1
        closes = last if self.size is None else self.waiting == self.size
        arrival = Arrival(
            upload,
            start,
            staleness=jnp.int32(self.steps - version),
            weight=jnp.float32(weight if accepted else 0),
            client=jnp.int32(self.numbers[node]),
            time=jnp.float32(now),
            closes=jnp.bool_(closes),
            local_steps=jnp.int32(local_steps if self.reads_steps else 1),
            key=self._key(),
        )
        self.replies += 1
        self.state, self.memory[node], _ = self.receive(self.state, self.memory[node], arrival)
        if closes:
            self.state, self.memory[node] = self.close(self.state, self.memory[node])
            self.steps, self.waiting = self.steps + 1, 0


def layout_of(arrays: NamedArrays) -> dict[str, str]:
    """Name -> kind and shape of each array."""
    return {name: f"{_kind(array)} {list(array.shape)}" for name, array in arrays.items()}


def _kind(array: np.ndarray) -> str:
    return "floats" if jnp.issubdtype(array.dtype, jnp.floating) else "whole numbers"


def _strategy(rule: Rounds, proximal: float, options: Mapping[str, object]) -> Any:
    """The strategy's class is made here, so that Flower is imported only if it is used."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict  # noqa: PLC0415
    from flwr.serverapp.strategy import FedAvg  # noqa: PLC0415

    def record_of(arrays: NamedArrays) -> ArrayRecord:
        return ArrayRecord({name: Array(array) for name, array in arrays.items()})

    class ServerRule(FedAvg):  # type: ignore[misc, unused-ignore]
        """``FedAvg``'s sampling and evaluation, with another server step."""

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: object) -> Iterable[object]:
            if server_round == 1 or rule.state is None:
                rule.begin({name: array.numpy() for name, array in arrays.items()})
            if proximal:
                config["proximal-mu"] = proximal
            messages = []
            for plain in super().configure_train(server_round, arrays, config, grid):
                node = plain.metadata.dst_node_id
                model = record_of(rule.message(node, server_round))
                content = RecordDict({self.arrayrecord_key: model, self.configrecord_key: ConfigRecord(dict(config))})
                messages.append(Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node))
            return messages

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[object, object]:
            good = [one for one in replies if not one.has_error()]
            for number, one in enumerate(good, start=1):
                node = one.metadata.src_node_id
                record, metrics = (_only(node, kind, one.content) for kind in ("array_records", "metric_records"))
                trained = {name: array.numpy() for name, array in record.items()}
                weight, steps = metrics.get(self.weighted_by_key), metrics.get(LOCAL_STEPS)
                rule.reply(node, trained, weight, server_round, number == len(good), steps)
            if not good:
                return None, None
            contents = [one.content for one in good]
            return record_of(rule.model), self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    return ServerRule(**options)


def _only(node: int, kind: str, content: object) -> Any:
    """The single record of a kind in a reply."""
    records = list(getattr(content, kind).values())
    check.require(len(records) == 1, f"reply of node {node}: {kind}", len(records), "one")
    return records[0]
