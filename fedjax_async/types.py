"""The contracts between the subpackages, in one file.

Contracts within one subpackage are in it: ``DelayModel`` and ``Delays`` in ``clock/durations.py``, ``Timing`` in
``clock/timing.py``, ``Scenario`` in ``clock/scenario.py``, ``Compressor`` in ``compress/payload.py``, ``Metric`` in
``models/metrics.py``. ``Method``, a rule with its timing and its clients, is in ``method.py``.

Letters in shapes: N clients, J jobs, E arrivals (events), W wave width, S slots, K local steps, B batch, D parameters,
M training examples, T test examples. Times are virtual seconds. No JAX here: the clock, pure NumPy, imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np

from fedjax_async.base.factories import TRACED

if TYPE_CHECKING:
    from jax import Array
    from jax.tree_util import PyTreeDef as Structure  # of a pytree
else:
    Array = Structure = Any

Tree = TypeVar("Tree")  # a pytree of any structure, where a function keeps it
Params = Any  # a pytree of arrays with D scalars in total
State = Any  # a pytree that only its algorithm interprets; () if it has no state
Key = Array  # a JAX random key
Path = tuple[str, ...]  # the path of a leaf in a pytree, such as ("head", "kernel")
Stays = Callable[[Path], bool]  # whether a leaf of the params stays with its node
AnyArray = np.ndarray | Array  # an array on the host, on the device or traced
Number = float | AnyArray  # a number, or an array of numbers
Whole = int | np.integer | AnyArray  # a whole number, or an array of them
Traced = Annotated[Number, TRACED]  # annotates a number that sweeps may vary in one compiled program: float or tracer
_NO_JOBS = np.zeros(0)


# --- clock: when things happen (host, NumPy) --------------------------------------------------
class Schedule(NamedTuple):
    """When everything happens. ``clock.plan`` computes it before any training, ``clock.make_schedule`` from arrays.

    A *job* is one local training of one client, from the model of version ``version[j]``. Jobs are numbered in order
    of dispatch. An *arrival* is the application of one job's upload by the server. Arrivals are listed in order of
    application. A job that never arrives has no arrival.
    """

    num_clients: int
    # one entry per job, in order of dispatch
    client: np.ndarray  # int32[J]
    number: np.ndarray  # int32[J]  earlier jobs of this client
    local_steps: np.ndarray  # int32[J]
    dispatch_time: np.ndarray  # float64[J]  when the server sends the start model
    upload_time: np.ndarray  # float64[J]  when the upload reaches the server (applied then or later); inf: never
    dispatched_after: np.ndarray  # int64[J]  arrivals applied before the dispatch
    version: np.ndarray  # int64[J]  server steps closed before the dispatch
    # one entry per arrival, in order of application
    job: np.ndarray  # int64[E]  its job, an index into the entries per job
    time: np.ndarray  # float64[E]  when the server applies it (for a window: the end of the window)
    closes: np.ndarray  # bool[E]  whether this arrival completes its server step
    step: np.ndarray  # int64[E]  server steps closed before this arrival is applied
    # one entry per job; filled by ``plan``, or by ``clock.check_schedule`` if you made the schedule yourself
    outcome: np.ndarray = _NO_JOBS.astype(np.int8)  # int8[J]  what became of the job: ``clock.Outcome``
    freed_time: np.ndarray = _NO_JOBS  # float64[J]  when the server stops waiting for it, with or without upload
    corrupt: np.ndarray = _NO_JOBS.astype(np.bool_)  # bool[J]  whether its upload, if it arrives, is all NaN
    copies: np.ndarray = _NO_JOBS.astype(np.int8)  # int8[J]  further copies of its upload; delivered and ignored
    # whether a budget is left, no job is under way, and no client can train any more: all left, are offline or crashed
    exhausted: bool = False
    failure_time: np.ndarray = _NO_JOBS  # float64[J], when it failed, was due (lost) or called off (given up), or inf

    @property
    def staleness(self) -> np.ndarray:
        """Server steps closed between dispatch of the start model and application of the upload; int64[E]."""
        return self.step - self.version[self.job]


# --- data and models --------------------------------------------------------------------------
class FederatedData(NamedTuple):
    """Pooled examples and the clients that own them (host arrays; the engine moves them to the device once).

    Client ``i`` owns the rows ``order[offset[i] : offset[i] + size[i]]`` of ``x`` and ``y``. Test and validation rows
    are stored in the same way. ``x``, ``y`` and ``order`` may be virtual: computed when indexed (``data.virtual``).
    """

    name: str
    x: Any  # [M, ...] raw dtype
    y: Any  # [M] int32 labels, [M, L] sequences of labels that end in zeros (padding), or [M, ...] float targets
    order: Any  # int32[M]
    offset: np.ndarray  # int32[N]
    size: np.ndarray  # int32[N]
    test_x: np.ndarray  # [T, ...]
    test_y: np.ndarray  # [T, ...]
    decode: Callable[[Array], Array]  # raw rows (for images uint8) -> model inputs, inside the compiled step
    num_classes: int | None = None
    test_order: np.ndarray | None = None  # rows of test_x that belong to each client; None: one global test set
    test_offset: np.ndarray | None = None
    test_size: np.ndarray | None = None
    streamed: bool = False  # too large for the device: x and y stay on disk, ``data.pack`` fetches them batch by batch
    validation_order: np.ndarray | None = None  # rows of x and y that each client holds out of training; None: no rows
    validation_offset: np.ndarray | None = None
    validation_size: np.ndarray | None = None
    malicious: np.ndarray | None = None  # bool[N], the clients that attack (setting ``attack``); None: none does
    client_names: Sequence[str] | None = None  # [N], where the data have them; only tables and pictures show them


class ClientData(NamedTuple):
    """The data of one client: the shared pool (never copied) and the client's range of ``order``."""

    x: Array  # [M, ...]
    y: Array  # [M, ...]
    order: Array  # int32[M]
    offset: Array  # int32[]
    size: Array  # int32[]
    weight: Array | None = None  # float[M] or float[], factors of the training examples' losses; None: 1


class Model(NamedTuple):
    """``init(key) -> params``; ``apply(params, x, key=None) -> outputs``; ``loss(outputs, y) -> [B]``.

    ``x`` [B, ...] is a batch of decoded inputs. With a key, dropout is active. The loss is per example, so that a
    partial batch is a masked mean. A model with running statistics (BatchNorm) keeps them in its params;
    ``train(params, x, key, mask) -> (outputs, params)`` normalises by the rows with mask 1 and updates them. Local
    training takes the updated statistics where the batch has at least two examples.
    ``private(path)``: whether a leaf of the params stays with its client, never sent nor uploaded.
    """

    init: Callable[[Key], Params]
    apply: Callable[..., Array]
    loss: Callable[[Array, Array], Array]
    train: Callable[..., tuple[Array, Params]] | None = None
    private: Callable[[Path], bool] | None = None


# --- learning, probes, results; kernels see ONE client, only engine/ stacks, gathers, scatters and vmaps ---
@dataclass(frozen=True)
class Facts:
    """What is known about a run before it starts; by default, of a single client, for a rule that is driven by hand.

    A pytree: its leaves are the totals, which may be traced.
    """

    num_clients: int = 1  # N
    every_closes: bool = False  # whether every arrival completes its server step
    updates: Whole = 0  # int32[], arrivals in total; 0: unknown
    server_steps: Whole = 0  # int32[], server steps in total; 0: unknown
    longest_step: int | None = None  # the most arrivals of one server step; set only for the checks before a run

    @property
    def static(self) -> Facts:
        """What is known when a run is compiled: the facts without totals, so a pytree without leaves, for a state."""
        return Facts(self.num_clients, self.every_closes, None, None)  # type: ignore[arg-type]


class Request(NamedTuple):
    """The job that needs a message. A rule without memory may use ``version`` only, see ``ServerAlgorithm``."""

    client: Whole = 0  # int32[]
    time: Number | np.floating = 0.0  # float[], virtual seconds, in JAX's default float type (float32: 0.06 s at 1e6 s)
    version: Whole = 0  # int32[], server steps closed so far
    local_steps: Whole = 1  # int32[], K of the job
    weight: Number | np.floating = 1.0  # float[], the client's example count


class Message(NamedTuple):
    """Server -> client."""

    params: Params
    extra: State = ()  # any pytree: control variates, moments ...
    version: Whole = 0  # int32[], server steps closed when it was sent; the engine fills it in
    local_steps: Any = ()  # int32[], K of the job that it starts, for ``begin`` and ``step``; never sent


class Arrival(NamedTuple):
    """Client -> server: one applied upload.

    A rejected upload (not finite, or too large) comes with ``weight`` 0 and an ``upload`` of zeros. It must add nothing
    to the server's state. ``receive`` decides how it changes the client's memory. ``closes`` still holds.

    Changes of running statistics (BatchNorm) from several stale clients must not be added up: they would overshoot.
    ``server.rebased(arrival, params)`` returns the arrival as if its client had started from the server's present
    statistics. ``server.rule`` does this.
    """

    upload: State  # any pytree; by default the model delta, trained - start
    start: Params  # the params of the message from which the client started
    staleness: Array  # int32[]
    weight: Array  # float[], the client's example count
    client: Array  # int32[]
    time: Array  # float[], virtual seconds, as in Request
    closes: Array  # bool[], whether it completes its server step
    local_steps: Whole = 1  # int32[], K of its job
    extra: State = ()  # the extra of the message from which the client started
    key: Any = ()  # the random key of this arrival, for noise that the server adds; the engine fills it in
    malicious: AnyArray | np.bool_ | tuple[()] = ()  # bool[], whether its client attacks; for ``server.attacked`` only


class Info(NamedTuple):
    """What a server records about an arrival."""

    weight: Array  # float[], the weight that the rule gave to the arrival; 0: the rule rejected it
    columns: Mapping[str, Array] = {}  # further scalars by name


class ServerAlgorithm(NamedTuple):
    """A server rule. ``memory`` is the server's row about ONE client, or ``()``; ``params(state)`` is evaluated.

    A rule says what an upload changes, not whether it counts: steps are planned before any training. An arrival to
    which it gives weight 0 still fills its buffer and closes its step. To ignore what is older, use the setting
    ``max_staleness``: such uploads are dropped before they count.

    ``init(params, facts) -> (state, memory)``, or ``init(params)`` if it needs no facts of the run. What the other
    functions need of them they find in the state: N in a shape, a total as a leaf, or ``facts.static``.
    ``receive(state, memory, arrival) -> (state, memory, info)`` accumulates an arrival.
    ``close(state, memory) -> (state, memory)`` completes a server step. It is called right after ``receive`` of the
    arrival that closes the step, with the memory of that client only. ``None``: ``receive`` does everything.
    ``dispatch(state, memory, request) -> (message, memory)``. Without memory it is called once per version, and all
    jobs of that version share the message. So it may read only ``request.version`` and what ``close`` changes (or what
    ``receive`` changes, where every arrival closes its step). A rule that sends more needs one, if only ``zeros(())``.
    ``sums``: whether it uses the uploads of a server step only through their sum ``sum_i w_i Delta_i``, with the
    recorded weights ``w_i > 0``, which depend on no upload. Secure aggregation and noise shared by a step need it.
    """

    init: Callable[..., tuple[State, State]]
    receive: Callable[[State, State, Arrival], tuple[State, State, Info]]
    dispatch: Callable[[State, State, Request], tuple[Message, State]]
    params: Callable[[State], Params]
    close: Callable[[State, State], tuple[State, State]] | None = None
    sums: bool = False


class ClientAlgorithm(NamedTuple):
    """Local training of one job, cut into steps so that the engine can batch jobs of unequal length.

    ``init(params) -> client_state``: a row that is kept between jobs, ``()`` if there is none.
    ``begin(key, message, client_state, data) -> work``; ``step(work, k, message, data) -> work``, k = 0, 1, ...;
    ``finish(work, message, client_state) -> (upload, client_state)``: pure, may be called several times. It has no
    ``message.local_steps``: count the steps in ``work`` if the upload depends on them.
    Optional: ``info(client_state)``, scalars to record about an upload, accepted or not, from the state after its job;
    ``unsent(before, after)``, the state after a job if the server never applies its upload (lost, late, dropped as too
    stale), by default ``after``. If the engine rejects the upload (not finite, or of too large a norm), the client
    keeps the state from before the job; if the rule gives it weight 0, the client keeps ``after``;
    ``own(message, client_state) -> params``, the model that the client itself would use, by default the message's;
    ``gradients(local_steps, examples)``, how many gradients of the loss a job of so many steps on so many examples
    computes (both and the result int64[J]), by default one per step.
    ``local.run_job`` runs ``begin``, all steps and ``finish``.
    """

    init: Callable[[Params], State]
    begin: Callable[[Key, Message, State, ClientData], State]
    step: Callable[[State, Array, Message, ClientData], State]
    finish: Callable[[State, Message, State], tuple[State, State]]
    info: Callable[[State], dict[str, Array]] | None = None
    unsent: Callable[[State, State], State] | None = None
    own: Callable[[Message, State], Params] | None = None
    gradients: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None


class Event(NamedTuple):
    """What a node knows of its compute event when it mixes and when it sends."""

    key: Key  # of the job, the same as the client's ``begin`` gets
    mass: Array  # float[], its push-sum mass after mixing, before it is split; 1 in an algorithm without masses
    kept: Array | float = 1.0  # float[], the part of the mass that it keeps when it is split; 1 without masses


class PeerAlgorithm(NamedTuple):
    """What ONE node does at a compute event: mix its inbox, train, push. Only the engine stacks nodes.

    A *row* is all that a node keeps between events, beside the state of its local training. A compute event is

    1. ``inbox = open(row)``; then ``inbox = add(inbox, row, message, weight)`` for each message of the inbox; then
       ``row = wake(row, inbox, event)``. The weights are planned by the clock (``PeerSchedule.weight``): the row's
       model becomes ``w + sum_d weight_d (message_d - w)``. A message that is not finite is not added: w stands for it.
    2. Local training by a ``ClientAlgorithm``, which begins from the message ``start(row)``.
    3. ``row, messages, columns = push(row, upload, event)``: the row after training, and what the node sends, a pytree
       of leaves [F, ...], one entry a fragment. ``upload``: the client algorithm's, zeros if it is not finite.
       ``columns``: scalars to record. Where one named ``withheld`` is true, the receivers know what they would be sent.

    ``init(params) -> row``: at the beginning, also for a node that joins late. ``params(row)``: what is evaluated.
    ``wire(message) -> bytes`` of one message on the network, from its shapes; ``None``: the bytes of its arrays.
    """

    init: Callable[[Params], State]
    open: Callable[[State], State]
    add: Callable[[State, State, State, Array], State]
    wake: Callable[[State, State, Event], State]
    start: Callable[[State], Message]
    push: Callable[[State, State, Event], tuple[State, State, Mapping[str, Array]]]
    params: Callable[[State], Params]
    fragments: int = 1  # F
    wire: Callable[[State], int] | None = None
    early: bool = False  # whether messages hold nothing of the event's training, so that they may leave before it
    cumulative: bool = False  # whether receivers add up what a node sends: each message must reach them exactly once
    debiased: bool = False  # whether steps are divided by the node's push-sum mass


class DataParts(NamedTuple):
    """The examples of one client, for a probe; a part that the data do not have is empty (size 0)."""

    train: ClientData
    validation: ClientData
    test: ClientData


class Probe(NamedTuple):
    """``function(state, memory, arrival, parts) -> {column: scalar}``, called before ``receive``; changes nothing.

    ``function.needs``, optional: the parts that it needs, ``("test",)``; a run whose clients lack one is refused.
    """

    function: Callable[[State, State, Arrival, DataParts], Mapping[str, Array]]
    every: int = 1  # at every ``every``-th arrival, beginning with the first
    at: Sequence[int] | None = None  # or at the arrivals with these numbers


class Evaluation(NamedTuple):
    """What a callback gets: one row of ``Run.evaluations``, on the host, as soon as it is computed."""

    run: str  # the run's name: its method; in a comparison with its seed; in a sweep the name of its point
    number: int  # the row, from 0: the start of the run
    time: float  # virtual seconds
    update: int  # arrivals applied before
    step: int  # server steps closed before
    scores: Mapping[str, Any]  # loss, accuracy, ...: NumPy scalars; client_...: [N]
    settings: Mapping[str, Any]  # as settings.json keeps them
    last: bool  # whether the run ends here by its budget
    again: bool  # computed by an earlier process or read from a finished run, and passed on once more


class Stop(NamedTuple):
    """What a callback returns to end its run at the evaluation that it got."""

    why: str


class Stopped(NamedTuple):
    """Why a run ended before its budget: at row ``evaluation`` of its evaluations, the last one."""

    by: str  # stop_at, patience or "callback NAME"
    why: str
    evaluation: int


class Best(NamedTuple):
    """The best model of a run: that of row ``evaluation`` of its evaluations."""

    params: Params
    evaluation: int
    by: str  # what is compared, such as "validation accuracy"
    value: float


class Run(NamedTuple):
    """What a simulation returns. Tables are dicts of equally long NumPy columns.

    ``evaluations``, one row per evaluation: time, update, step, loss, accuracy, bytes_up, bytes_down; where clients
    have validation parts, also validation_loss and validation_accuracy on all of them together. ``updates``, one row
    per arrival: client, job (the client's n-th, from 0: ``Schedule.number``), dispatch_time, arrival_time (when it was
    applied), step, staleness, local_steps, gradients (of the loss, that its job computed), weight, upload_norm,
    accepted, closes, step_changed, used. With compressed uploads evaluations also have values_bytes_up, and updates
    have upload_bytes and upload_values_bytes. With the setting ``energy`` both have energy (J) and carbon (g CO2e): of
    all clients so far, and of the job. ``per_client``: accuracy and loss [rows, N], and own_accuracy and own_loss if
    clients have models of their own; or empty. ``counters``: updates, unused, server_steps, local_steps and gradients
    (of all arrivals), unchanged_steps (closed without an accepted upload), rejected (arrivals: not finite, too_large or
    of zero_weight), trained_in_vain, lost, dropped_stale (no arrivals), ... (``clock.fault_counts``), waves,
    mean_width; with the setting ``attack`` also attackers and malicious (uploads of attackers); in a run that ended
    before its budget, because no client could train any more, ended_early (a text); the wave engine adds batches,
    widths, slots, useful_steps, executed_steps, programs and, without a server, device_memory_bytes (no messages).
    ``probes``: one table per probe, one row per chosen arrival: update (its number, from 0), client, time and the
    columns of the probe. ``stopped``: why the run ended before its budget; all tables end there, and ``params`` are
    those of the last evaluation. ``best``: with ``keep_best``. ``client_names``: of the data.

    A run that ends within a server step has arrivals that are not ``used``: ``unused`` counts them, and neither
    ``updates`` nor the column ``update`` does. Where every upload changes the model at once, all are used.
    """

    settings: dict[str, Any]
    params: Params
    evaluations: dict[str, np.ndarray]
    updates: dict[str, np.ndarray]
    per_client: dict[str, np.ndarray]
    counters: dict[str, Any]
    schedule: Any  # a Schedule, or a ``peers.PeerSchedule`` of a run without a server
    probes: Mapping[str, dict[str, np.ndarray]] = {}
    stopped: Stopped | None = None
    best: Best | None = None
    client_names: Sequence[str] | None = None  # [N]

    def __repr__(self) -> str:
        """One line, since the tables have thousands: method, updates and the last loss and accuracy."""
        last = {name: self.evaluations[name][-1:] for name in ("loss", "accuracy") if name in self.evaluations}
        shown = [f"{name} {values[0]:.4g}" for name, values in last.items() if len(values) and values[0] == values[0]]
        counted = [str(self.settings.get("method")), f"{self.counters.get('updates', 0)} updates"]
        return f"<Run: {', '.join(counted + shown)}>"

    @property
    def has_server(self) -> bool:
        """Whether arrivals close server steps, as nodes' do not; without a schedule: no column ``consensus``."""
        return "consensus" not in self.evaluations if self.schedule is None else hasattr(self.schedule, "closes")
