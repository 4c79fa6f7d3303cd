"""The map: every contract between the rooms of the package, in one file.

In shapes: N clients, J jobs, E arrivals (events), W wave width, S slots, K local steps, B batch, D parameters, M
training examples. Times are virtual seconds. No JAX here, so that the clock, which is plain NumPy, can lean on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jax import Array
else:
    Array = Any

Params = Any  # a pytree of arrays; D scalars in all
State = Any  # a pytree private to one algorithm; () when there is none
Key = Any  # a JAX random key


# --- clock: when things happen (host, NumPy) --------------------------------------------------

_NO_JOBS = np.zeros(0)


class Schedule(NamedTuple):
    """When everything happens, decided before any training.

    A *job* is one local training of one client, sent at ``dispatch_time[j]`` from the model of version ``version[j]``.
    Jobs are numbered in order of dispatch. An *arrival* is the application of one job's upload by the server; arrivals
    are listed in the order of application, jobs that never arrive are not.
    """

    num_clients: int
    # one entry a job, in order of dispatch
    client: np.ndarray  # int32[J]
    number: np.ndarray  # int32[J]   how many jobs this client had been given before
    local_steps: np.ndarray  # int32[J]
    dispatch_time: np.ndarray  # float64[J]
    upload_time: np.ndarray  # float64[J]  when the upload reaches the server (applied then or later); inf: never
    dispatched_after: np.ndarray  # int64[J]  arrivals applied before this job was sent
    version: np.ndarray  # int64[J]  server steps closed before this job was sent
    # one entry an arrival, in order of application
    job: np.ndarray  # int64[E]
    time: np.ndarray  # float64[E]  when the server applies it (for a window: the window's end)
    closes: np.ndarray  # bool[E]    whether this arrival completes its server step
    step: np.ndarray  # int64[E]   server steps closed before this arrival is applied
    # one entry a job again; ``plan`` always fills these, schedules made by hand may leave them empty
    fate: np.ndarray = _NO_JOBS.astype(np.int8)  # int8[J]  what became of it: ``clock.Fate``
    freed_time: np.ndarray = _NO_JOBS  # float64[J]  when the server stops waiting for it, with or without upload
    corrupt: np.ndarray = _NO_JOBS.astype(np.bool_)  # bool[J]  its upload, if it arrives, is NaN throughout
    copies: np.ndarray = _NO_JOBS.astype(np.int8)  # int8[J]  further copies of its upload delivered, and ignored

    @property
    def staleness(self) -> np.ndarray:
        """Server steps closed between the receipt of the start model and this application; int64[E]."""
        return self.step - self.version[self.job]


# --- data -------------------------------------------------------------------------------------


class FederatedData(NamedTuple):
    """Pooled examples and who owns which (host arrays; the engine moves them to the device once).

    Client ``i`` owns the rows ``order[offset[i] : offset[i] + size[i]]`` of ``x`` and ``y``. ``decode`` turns raw rows
    (for images: uint8) into model inputs inside the compiled step. ``x``, ``y`` and ``order`` may be virtual
    (``data.virtual``): computed where they are indexed. ``streamed`` data are too large for the device: ``x`` and ``y``
    stay on disk, and ``data.pack`` fetches the clients of one batch.
    """

    name: str
    x: Any  # [M, ...] raw dtype
    y: Any  # [M] int32 labels, or [M, ...] float targets
    order: Any  # int32[M]
    offset: np.ndarray  # int32[N]
    size: np.ndarray  # int32[N]
    test_x: np.ndarray  # [T, ...]
    test_y: np.ndarray  # [T, ...]
    decode: Callable[[Array], Array]
    num_classes: int | None = None
    # rows of test_x that belong to each client (CSR, like order/offset/size); None: one global test set
    test_order: np.ndarray | None = None
    test_offset: np.ndarray | None = None
    test_size: np.ndarray | None = None
    streamed: bool = False


class ClientData(NamedTuple):
    """What one client sees: the pool (shared, never copied) and its own range of ``order``."""

    x: Array  # [M, ...]
    y: Array  # [M, ...]
    order: Array  # int32[M]
    offset: Array  # int32[]
    size: Array  # int32[]


# --- models -----------------------------------------------------------------------------------


class Model(NamedTuple):
    """``init(key) -> params``; ``apply(params, x, key=None) -> outputs``; ``loss(outputs, y) -> [B]``.

    ``x`` is a batch ``[B, ...]`` of decoded inputs. A key switches dropout on. ``loss`` is per example, so that a
    partial batch is a masked mean. A model with running statistics (BatchNorm) keeps them in its params, and
    ``train(params, x, key, mask) -> (outputs, params)`` normalises by the rows whose mask is 1 and moves them.
    ``private`` names a top-level entry of the params that stays with its client: it is never uploaded.
    """

    init: Callable[[Key], Params]
    apply: Callable[..., Array]
    loss: Callable[[Array, Array], Array]
    train: Callable[..., tuple[Array, Params]] | None = None
    private: str | None = None


# --- learning: kernels that see ONE client; only engine/ stacks, gathers, scatters and vmaps ------


class Message(NamedTuple):
    """Server -> client. ``version``: server steps closed when it was sent, int32[]."""

    params: Params
    extra: State = ()
    version: Any = 0


class Arrival(NamedTuple):
    """Client -> server, one applied upload.

    ``weight`` is the client's example count. A rejected upload (non-finite) comes with ``weight`` 0 and an all-zero
    ``upload``; it must add nothing, but ``closes`` still holds.
    """

    upload: Params  # model delta, trained - start, unless the client algorithm says otherwise
    start: Params  # the params of the message it started from
    staleness: Array  # int32[]
    weight: Array  # float[]
    client: Array  # int32[]
    time: Array  # float[]  virtual seconds
    closes: Any  # bool[], or the constant True in a run whose every arrival closes its step


class ServerAlgorithm(NamedTuple):
    """``init(params) -> (state, memory)``; ``memory`` is the server's row about ONE client, or ``()``.

    ``receive(state, memory, arrival) -> (state, memory, info)``, ``info`` a dict of scalars; ``dispatch(state, memory)
    -> (message, memory)``; ``params(state)`` is the model that is evaluated. Without memory, all jobs sent from one
    version share a message: it must then depend only on what changes when a step closes. Others declare memory.
    """

    init: Callable[[Params], tuple[State, State]]
    receive: Callable[[State, State, Arrival], tuple[State, State, dict[str, Array]]]
    dispatch: Callable[[State, State], tuple[Message, State]]
    params: Callable[[State], Params]


class ClientAlgorithm(NamedTuple):
    """Local training of one job, cut into steps so that the engine can batch jobs of unequal length.

    ``init(params) -> client_state``: a row that survives between jobs, ``()`` if none.
    ``begin(key, message, client_state, data) -> work``, ``step(work, k, message, data) -> work``, k = 0, 1, ...
    ``finish(work, message, client_state) -> (upload, client_state)``: pure, may be called repeatedly.
    ``info(client_state)``, optional: scalars to record of an upload, accepted or not, from the state its job left.
    ``local.run_job`` is the composition of begin, step and finish.
    """

    init: Callable[[Params], State]
    begin: Callable[[Key, Message, State, ClientData], State]
    step: Callable[[State, Array, Message, ClientData], State]
    finish: Callable[[State, Message, State], tuple[Params, State]]
    info: Callable[[State], dict[str, Array]] | None = None


# --- results ----------------------------------------------------------------------------------


class Run(NamedTuple):
    """What a simulation returns. Tables are dicts of equally long NumPy columns.

    ``evaluations``, a row each: time, update, step, loss, accuracy, bytes_up, bytes_down. ``updates``, one an arrival:
    client, job, dispatch_time, arrival_time (when it was applied), step, staleness, local_steps, weight, upload_norm,
    accepted, closes. Compressed uploads add values_bytes_up to the one, upload_bytes and upload_values_bytes to the
    other. ``per_client``: accuracy and loss [rows, N], or empty. ``counters``: updates, server_steps, rejected (not
    finite, too large or too stale), lost, late, ... (``clock.fault_counts``), waves, mean_width, and of the wave engine
    batches, widths, slots, useful_steps, executed_steps, programs.
    """

    settings: dict[str, Any]
    params: Params
    evaluations: dict[str, np.ndarray]
    updates: dict[str, np.ndarray]
    per_client: dict[str, np.ndarray]
    counters: dict[str, Any]
    schedule: Schedule
