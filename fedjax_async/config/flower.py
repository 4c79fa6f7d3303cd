"""A server rule of this package as a strategy of Flower: ``strategy("fedadam", clients=10, rounds=5)``.

Needs the extra ``flower`` (``flwr`` from 1.42 on, with its ``serverapp`` strategies). Flower samples the nodes, sends
the model and collects the trained ones, in a simulation or on devices; the rule turns them into the next model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async import check, registry, tree
from fedjax_async.clock import TIMINGS
from fedjax_async.config.methods import Method, local_options, method_of
from fedjax_async.engine.components import rule_of
from fedjax_async.local import local_training
from fedjax_async.server import closed
from fedjax_async.types import Arrival, Facts, Params, Request, ServerAlgorithm

INSTALL = "left out without Flower: pip install 'fedjax-async[flower]'"


def strategy(method: str, *, clients: int, rounds: int, **options: Any) -> Any:
    """A ``flwr.serverapp.strategy.Strategy`` whose server step is the rule of ``method``.

    All nodes of a round start from one model and are waited for, since Flower's rounds are synchronous. The method's
    timing says when server steps close: with ``cohort`` once a round, with ``every`` at each reply, in the order of the
    replies, with ``buffer:size=K`` at every K-th reply, over rounds. The staleness of a reply is the number of steps
    that earlier replies of its round closed. A reply that is not finite is rejected.

    Args:
      method: as in a run, ``"fedbuff+swa@buffer:size=5"``. Its clients must need nothing but the model: methods with
        local training, messages or compression of their own (SCAFFOLD, FedDyn, AsyncCurve...) are refused. A proximal
        weight goes to the clients as ``proximal-mu``, as that of Flower's own FedProx.
      clients: the most nodes that will ever take part.
      rounds: of the whole run; schedules of the rule depend on it.
      options: of ``flwr.serverapp.strategy.FedAvg``: ``fraction_train``, ``min_available_nodes`` and others.

    Integer arrays, such as BatchNorm's counts, are those of the newest reply. Raises: ``ValueError`` naming what cannot
    be used, and without Flower.
    """
    check.whole("clients", clients)
    check.whole("rounds", rounds)
    chosen = method_of(method)
    size = _closes_after(method, chosen)
    share = float(options.get("fraction_train", 1.0))
    updates = max(1, int(clients * share)) * rounds
    facts = Facts(clients, size == 1, updates, rounds if size is None else updates // size)
    check.require(importlib.util.find_spec("flwr") is not None, "strategy", method, INSTALL)
    rule = Rounds(rule_of(chosen.server, chosen.hyper, facts), clients, size, method)
    return _strategy(rule, float(chosen.proximal), options)


def _closes_after(method: str, chosen: Method) -> int | None:
    """The replies of a server step; None: all of a round. ``ValueError`` for a method that Flower's rounds lack."""
    plain = chosen.client is local_training and not local_options(method) and chosen.compress is None
    check.require(plain, "method", method, "one whose clients train by themselves and upload the whole model")
    name, given = registry.parse_spec("timing", chosen.timing)
    registry.bind("timing", TIMINGS, chosen.timing)()  # checks names and ranges
    closing = {"every": 1, "buffer": given.get("size", 10), "cohort": None}
    check.one_of("timing of the method", name, closing)
    return closing[name]


class Rounds:
    """The state of a rule between rounds: of the server, of its memory of each node, and what was sent."""

    def __init__(self, rule: ServerAlgorithm, clients: int, size: int | None, method: str) -> None:
        self.rule, self.clients, self.size, self.method = rule, clients, size, method
        self.state: Any = None
        self.memory: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}  # node id -> number of the client
        self.sent: dict[int, tuple[Params, int]] = {}  # node id -> the model it got, steps closed before
        self.steps = self.waiting = 0
        self.receive, self.dispatch = jax.jit(rule.receive), jax.jit(rule.dispatch)
        self.close = jax.jit(lambda state, memory: closed(rule, state, memory))

    def begin(self, params: Params) -> None:
        """Start from these params; ``ValueError`` for a rule whose messages hold more than a model."""
        self.state, self.blank = self.rule.init(params)
        message, _ = jax.eval_shape(self.rule.dispatch, self.state, self.blank, Request())
        extra = len(jax.tree.leaves(message.extra))
        check.require(
            extra == 0, "method", self.method, f"one that sends the model alone, not {extra} arrays beside it"
        )

    def message(self, node: int, now: int) -> Params:
        """The model for a node."""
        number = self.numbers.setdefault(node, len(self.numbers))
        allowed = f"at most {self.clients}, as strategy(clients=...) says"
        check.require(number < self.clients, "nodes", len(self.numbers), allowed)
        request = Request(np.int32(number), np.float32(now), np.int32(self.steps), np.int32(1), np.float32(1))
        message, self.memory[node] = self.dispatch(self.state, self.memory.get(node, self.blank), request)
        self.sent[node] = (message.params, self.steps)
        return message.params

    def reply(self, node: int, trained: Params, weight: float, now: int, last: bool) -> None:
        """Receive a node's trained model, ``last`` of its round."""
        start, version = self.sent.pop(node)
        upload = jax.tree.map(jnp.subtract, trained, start)
        accepted = bool(tree.is_finite(upload)) and np.isfinite(weight)
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
            local_steps=jnp.int32(1),
        )
        self.state, self.memory[node], _ = self.receive(self.state, self.memory[node], arrival)
        if closes:
            self.state, self.memory[node] = self.close(self.state, self.memory[node])
            self.steps, self.waiting = self.steps + 1, 0


def _strategy(rule: Rounds, proximal: float, options: Mapping[str, Any]) -> Any:
    """The class is made here: Flower is imported by those who use it."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict  # noqa: PLC0415
    from flwr.serverapp.strategy import FedAvg  # noqa: PLC0415

    class ServerRule(FedAvg):  # type: ignore[misc, unused-ignore]
        """``FedAvg``'s sampling and evaluation, with another server step."""

        def __init__(self) -> None:
            super().__init__(**options)
            self.fixed: dict[str, np.ndarray] = {}  # arrays of whole numbers
            self.dtypes: dict[str, Any] = {}

        def _floats(self, record: Any) -> dict[str, Any]:
            arrays = {name: array.numpy() for name, array in record.items()}
            whole = {name: a for name, a in arrays.items() if not jnp.issubdtype(a.dtype, jnp.floating)}
            self.fixed |= whole
            return {name: jnp.asarray(a) for name, a in arrays.items() if name not in whole}

        def _record(self, params: Params) -> Any:
            floats = {name: np.asarray(array).astype(self.dtypes[name]) for name, array in params.items()}
            arrays = {name: floats.get(name, self.fixed.get(name)) for name in self.dtypes}
            return ArrayRecord({name: Array(array) for name, array in arrays.items()})

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
            if rule.state is None:
                self.dtypes = {name: array.numpy().dtype for name, array in arrays.items()}
                rule.begin(self._floats(arrays))
            if proximal:
                config["proximal-mu"] = proximal
            messages = []
            for plain in super().configure_train(server_round, arrays, config, grid):
                node = plain.metadata.dst_node_id
                model = self._record(rule.message(node, server_round))
                content = RecordDict({self.arrayrecord_key: model, self.configrecord_key: ConfigRecord(dict(config))})
                messages.append(Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node))
            return messages

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
            good = [one for one in replies if not one.has_error()]
            for number, one in enumerate(good, start=1):
                trained = self._floats(next(iter(one.content.array_records.values())))
                weight = float(next(iter(one.content.metric_records.values()))[self.weighted_by_key])
                rule.reply(one.metadata.src_node_id, trained, weight, server_round, last=number == len(good))
            if not good:
                return None, None
            contents = [one.content for one in good]
            metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
            return self._record(rule.rule.params(rule.state)), metrics

    return ServerRule()
