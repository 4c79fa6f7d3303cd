"""The map: every contract between the rooms of the package, in one file.

In shapes: N clients, J jobs, E arrivals (events), W wave width, S slots, K local steps, B batch, D parameters, M
training examples. Times are virtual seconds. No JAX here, so that the clock, which is plain NumPy, can lean on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from fedjax_async.registry import TRACED

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
    are listed in the order of application, jobs that never arrive are not. ``clock.make_schedule`` makes one by hand.
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
    # one entry a job again; ``plan`` fills these, and ``clock.check_schedule`` in schedules made by hand
    outcome: np.ndarray = _NO_JOBS.astype(np.int8)  # int8[J]  what became of it: ``clock.Outcome``
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
    # rows of x and y that each client holds out of training (CSR, like order/offset/size); None: no validation part
    validation_order: np.ndarray | None = None
    validation_offset: np.ndarray | None = None
    validation_size: np.ndarray | None = None


class ClientData(NamedTuple):
    """What one client sees: the pool (shared, never copied) and its own range of ``order``."""

    x: Array  # [M, ...]
    y: Array  # [M, ...]
    order: Array  # int32[M]
    offset: Array  # int32[]
    size: Array  # int32[]


# --- models -----------------------------------------------------------------------------------

Path = tuple[str, ...]  # where a leaf stands in the params: the names on the way to it, as ("head", "kernel")


class Model(NamedTuple):
    """``init(key) -> params``; ``apply(params, x, key=None) -> outputs``; ``loss(outputs, y) -> [B]``.

    ``x`` is a batch ``[B, ...]`` of decoded inputs. A key switches dropout on. ``loss`` is per example, so that a
    partial batch is a masked mean. A model with running statistics (BatchNorm) keeps them in its params, and
    ``train(params, x, key, mask) -> (outputs, params)`` normalises by the rows whose mask is 1 and moves them.
    ``private(path)`` says which leaves of the params stay with their client: they are never sent or uploaded.
    """

    init: Callable[[Key], Params]
    apply: Callable[..., Array]
    loss: Callable[[Array, Array], Array]
    train: Callable[..., tuple[Array, Params]] | None = None
    private: Callable[[Path], bool] | None = None


# --- learning: kernels that see ONE client; only engine/ stacks, gathers, scatters and vmaps ------

# The annotation of a factory's number that sweeps may vary within one compiled program: a float, or a tracer.
Traced = Annotated[Any, TRACED]


class Facts(NamedTuple):
    """What is known of a run before it starts."""

    num_clients: int = 1  # N
    every_closes: bool = False  # whether every arrival completes its server step
    updates: Any = 0  # int32[], arrivals in all
    server_steps: Any = 0  # int32[], server steps that will be closed


class Request(NamedTuple):
    """What a message is asked for. Rules without memory send one message a version: they may use ``version`` only."""

    client: Any = 0  # int32[]
    time: Any = 0.0  # float[], virtual seconds, in JAX's default float type (float32 resolves 0.06 s at 1e6 s)
    version: Any = 0  # int32[], server steps closed so far
    local_steps: Any = 1  # int32[], K of the job
    weight: Any = 1.0  # float[], the client's example count


class Message(NamedTuple):
    """Server -> client. ``version``: server steps closed when it was sent, int32[]; the engine fills it in."""

    params: Params
    extra: State = ()  # any pytree: control variates, moments ...
    version: Any = 0


class Arrival(NamedTuple):
    """Client -> server, one applied upload.

    A rejected upload (not finite, or too large) comes with ``weight`` 0 and an all-zero ``upload``. It must add
    nothing, and ``receive`` decides what of the client's memory it changes; ``closes`` still holds.
    """

    upload: Any  # any pytree; by default the model delta, trained - start
    start: Params  # the params of the message it started from
    staleness: Array  # int32[]
    weight: Array  # float[]  the client's example count
    client: Array  # int32[]
    time: Array  # float[]  virtual seconds, as in Request
    closes: Array  # bool[]  whether it completes its server step
    local_steps: Any = 1  # int32[]  K of its job
    extra: State = ()  # the extra of the message it started from


class Info(NamedTuple):
    """What a server records of an arrival."""

    weight: Array  # float[]  with which it counted; 0: the rule rejected it
    columns: Mapping[str, Array] = {}  # scalars under further names


class ServerAlgorithm(NamedTuple):
    """A server rule. ``memory`` is the server's row about ONE client, or ``()``; ``params(state)`` is evaluated.

    ``init(params) -> (state, memory)``;
    ``receive(state, memory, arrival) -> (state, memory, info)`` gathers an arrival;
    ``close(state, memory) -> (state, memory)`` completes a server step, right after ``receive`` of the arrival that
    closes it and with that client's memory. ``None``: ``receive`` does all there is to do.
    ``dispatch(state, memory, request) -> (message, memory)``. Without memory, all jobs sent from one version share a
    message: it must then depend only on what changes when a step closes. Others declare memory.
    ``given(facts) -> rule``, optional: the same rule for a run of which these facts hold, asked for once.
    """

    init: Callable[[Params], tuple[State, State]]
    receive: Callable[[State, State, Arrival], tuple[State, State, Info]]
    dispatch: Callable[[State, State, Request], tuple[Message, State]]
    params: Callable[[State], Params]
    close: Callable[[State, State], tuple[State, State]] | None = None
    given: Callable[[Facts], ServerAlgorithm] | None = None


class ClientAlgorithm(NamedTuple):
    """Local training of one job, cut into steps so that the engine can batch jobs of unequal length.

    ``init(params) -> client_state``: a row that survives between jobs, ``()`` if none.
    ``begin(key, message, client_state, data) -> work``, ``step(work, k, message, data) -> work``, k = 0, 1, ...
    ``finish(work, message, client_state) -> (upload, client_state)``: pure, may be called repeatedly.
    ``info(client_state)``, optional: scalars to record of an upload, accepted or not, from the state its job left.
    ``unsent(before, after)``, optional: the state after a job whose upload the server never applies; else ``after``.
    ``own(message, client_state) -> params``, optional: the model that the client itself would use; else the message's.
    ``local.run_job`` is the composition of begin, step and finish.
    """

    init: Callable[[Params], State]
    begin: Callable[[Key, Message, State, ClientData], State]
    step: Callable[[State, Array, Message, ClientData], State]
    finish: Callable[[State, Message, State], tuple[Any, State]]
    info: Callable[[State], dict[str, Array]] | None = None
    unsent: Callable[[State, State], State] | None = None
    own: Callable[[Message, State], Params] | None = None


class Parts(NamedTuple):
    """The examples of one client, as a probe sees them; a part that the data do not have is empty (size 0)."""

    train: ClientData
    validation: ClientData
    test: ClientData


class Probe(NamedTuple):
    """``function(state, memory, arrival, parts) -> {column: scalar}``, evaluated before chosen arrivals are received.

    Chosen are every ``every``-th arrival, counted from the first, or those numbered ``at``. A probe changes nothing.
    """

    function: Callable[[State, State, Arrival, Parts], Mapping[str, Array]]
    every: int = 1
    at: Sequence[int] | None = None


# --- results ----------------------------------------------------------------------------------


class Run(NamedTuple):
    """What a simulation returns. Tables are dicts of equally long NumPy columns.

    ``evaluations``, a row each: time, update, step, loss, accuracy, bytes_up, bytes_down. ``updates``, one an arrival:
    client, job, dispatch_time, arrival_time (when it was applied), step, staleness, local_steps, weight, upload_norm,
    accepted, closes, step_changed. Compressed uploads add values_bytes_up to the one, upload_bytes and
    upload_values_bytes to the other. ``per_client``: accuracy and loss [rows, N], and own_accuracy
    and own_loss where clients have models of their own; or empty.
    ``counters``: updates, server_steps, unchanged_steps (closed without an accepted upload), rejected (not finite, too
    large or too stale), trained_in_vain, lost, late, ... (``clock.fault_counts``), waves, mean_width, and of the wave
    engine batches, widths, slots, useful_steps, executed_steps, programs. ``probes``: a table a
    probe, a row a chosen arrival: update (its number, from 0), client, time and the probe's own columns.
    """

    settings: dict[str, Any]
    params: Params
    evaluations: dict[str, np.ndarray]
    updates: dict[str, np.ndarray]
    per_client: dict[str, np.ndarray]
    counters: dict[str, Any]
    schedule: Schedule
    probes: Mapping[str, dict[str, np.ndarray]] = {}
