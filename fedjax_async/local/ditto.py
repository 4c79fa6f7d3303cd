"""Ditto: a personal model of each client, trained beside the global job and drawn to the global model.

Source: Li et al., "Ditto: fair and robust federated learning through personalization" (2021), Algorithm 1.
"""

from __future__ import annotations

import jax
import numpy as np

from fedjax_async.base import tree
from fedjax_async.local.private import wrapping
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Params, State

DITTO = 0xD1770  # folded into a job's key, so that the personal model has minibatches of its own


def with_personal_model(client: ClientAlgorithm, trainer: ClientAlgorithm) -> ClientAlgorithm:
    """Wrap ``client``: a model ``v`` stays with it from job to job, and takes as many steps in each job as ``client``.

    ``v <- v - eta (grad F(v) + lambda (v - w))``, with w the model that the client received. Uploads are those of
    ``client``, so the global run does not change. v starts at the run's first params; if it is not finite after a job,
    it keeps its value from before. ``own`` gives v.

    Args:
      trainer: ``local_training`` with ``proximal=lambda``, of the model without private leaves; it has the optimiser,
        learning rate and batch size of the personal model. Deviation: v takes as many steps as the global job.
    """

    def init(params: Params) -> State:
        return client.init(params), params

    def reference(message: Message, client_state: State) -> Params:
        """w, with the private leaves of the client's own."""
        return message.params if client.own is None else client.own(message, client_state)

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> State:
        inner, model = client_state
        start = message._replace(params=model, extra=())
        personal = trainer.begin(jax.random.fold_in(key, DITTO), start, (), data)
        return client.begin(key, message, inner, data), personal, reference(message, inner)

    def step(work: State, k: Array, message: Message, data: ClientData) -> State:
        inner, personal, drawn_to = work
        towards = message._replace(params=drawn_to, extra=())
        return client.step(inner, k, message, data), trainer.step(personal, k, towards, data), drawn_to

    def finish(work: State, message: Message, client_state: State) -> tuple[Params, State]:
        inner, personal, _ = work
        upload, kept = client.finish(inner, message, client_state[0])
        model = tree.where(tree.is_finite(personal.params), personal.params, client_state[1])
        return upload, (kept, model)

    def gradients(steps: np.ndarray, examples: np.ndarray) -> np.ndarray:
        each = [one.gradients(steps, examples) if one.gradients else steps for one in (client, trainer)]
        return np.asarray(each[0] + each[1])

    return wrapping(
        client,
        init=init,
        begin=begin,
        step=step,
        finish=finish,
        own=lambda message, client_state: client_state[1],
        gradients=gradients,
    )
