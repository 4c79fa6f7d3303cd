"""Wrong values and objects in calls from Python: a ``ValueError`` of one line that names the argument, at once."""

import itertools
import re

import jax
import numpy as np
import pytest
from flax import linen, nnx

from fedjax_async import Method, clock, compare, models, named, peers, results, resume, server, simulate, sweep
from fedjax_async.base.fingerprints import fingerprint
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import Settings, objects, prepare, trajectory, tune
from fedjax_async.engine import Every, evaluation_points
from fedjax_async.peers import full_models
from fedjax_async.theory import curl_probe
from tests.told import is_refused, refusal

SMALL = {"model": "logistic", "clients": 4, "updates": 6}
LARGE = 10**400
MOMENTS = "must be a text of virtual seconds >= 0 joined by commas, such as '100,500'"


class Tensor:
    """As a parameter of PyTorch: it has a dtype, and refuses to become an array of NumPy."""

    dtype, shape, requires_grad = "torch.float32", (3, 5), True

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


class Module:
    """As a module of PyTorch: it can be called, and holds tensors and functions."""

    def __init__(self):
        self._parameters = {"weight": Tensor()}

    def __call__(self, x):
        return x


Module.__module__, Tensor.__module__ = "torch.nn.modules.module", "torch"


class OfTorch(Module):
    pass


class WithDropout(nnx.Module):
    def __init__(self):
        self.dense, self.dropout = nnx.Linear(5, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(self.dense(x))


class Speechless:
    def __repr__(self):
        raise RuntimeError("no text")


OTHERS = {
    "a Linear of PyTorch": (OfTorch(), "a OfTorch"),
    "an nnx module with dropout": (WithDropout(), "a WithDropout"),
    "a linen module": (linen.Dense(3), "a Dense"), "a generator": ((i for i in range(3)), "a generator"),
    "a generator of NumPy": (np.random.default_rng(0), "a Generator"),
    "an object without a text": (Speechless(), "a Speechless"), "a Python module": (np, "a module"),
    "a budget": (clock.Until(updates=3), "a Until"), "a tensor": (Tensor(), "a Tensor"),
    "a random key": (jax.random.key(0), "a PRNGKeyArray"),
}  # fmt: skip

WANTED = {
    "method": "a name or a Method", "timing": "timing\\(scenario\\)", "policy": "model\\(prior\\)",
    "topology": "a networkx graph", "exchange": "exchange\\(setup\\)", "delay": "clock.Delays",
    "availability": "clock.Availability", "faults": "clock.Faults", "network": "clock.Network",
    "dataset": "a Dataset, a Federation or FederatedData", "partition": "indices of client 0",
    "augment": "augment\\(key, x\\)", "model": "a Model, or a module of flax", "initial": "a pytree of arrays",
    "optimizer": "an optax transformation", "client": "a ClientAlgorithm", "compress": "a name or a Compressor",
    "metrics": "a dict of names and metrics",
}  # fmt: skip
NO_OBJECT = ("attack", "privacy", "energy", "normalise", "personal", "eval_at", "decay", "memory_limit")
WANTED |= dict.fromkeys(NO_OBJECT, "")
FITTING = {("model", "an nnx module with dropout"), ("model", "a linen module"), ("initial", "a tensor")}


@pytest.mark.parametrize(("field", "kind"), [pair for pair in itertools.product(WANTED, OTHERS) if pair not in FITTING])
def test_every_setting_names_itself_the_object_and_what_it_takes(field, kind):
    assert set(objects.KINDS) <= set(WANTED)
    thing, shown = OTHERS[kind]
    if not WANTED[field] or (field == "topology" and not callable(thing)):  # shown by its text
        shown = ""
    is_refused(f"^{field} = .*{shown}.*: must be .*{WANTED[field]}", Settings, **{field: thing})


ADVICE = "of PyTorch's objects, a torch.nn.Module"
OBJECTS = [
    # a name around the object hides nothing
    (lambda: named("mine", server.fedasync()), r"^object = 'a ServerAlgorithm': .*; wrap the rule: Method\(rule"),
    (lambda: Settings(delay=named("mine", np.ones(3))), "^delay = 'a ndarray': must be "),
    (lambda: Settings(model=named("mine", Method(server.fedasync()))), "^model = 'a Method': must be "),
    (lambda: Settings(dataset=named("mine", abs)), "^dataset = 'a builtin_function_or_method': must be "),
    (lambda: Settings(attack=named("mine", lambda: None)),
     "^attack = 'a function': must be a text: this setting takes no object"),
    (lambda: named("net", OfTorch()), f"^object = 'a OfTorch': must be .* a Model, a module .*{ADVICE}"),
    (lambda: simulate(model=OfTorch(), updates=1), f"^model = 'a OfTorch': must be .*; .*{ADVICE}"),
    (lambda: simulate(model=linen.Dense, updates=1), r"model = 'the class Dense': .*; make one: Dense\(\.\.\.\)"),
    (lambda: simulate(model=WithDropout(), updates=1), "^model.apply: must be .*; it raised TypeError: dot_general"),
    *[(lambda field=field, made=made: Settings(**{field: made}, updates=1),
       rf"^{field} = 'a function': .*; give what the factory returns: {made.__name__}\(\.\.\.\)")
      for field, made in (("delay", clock.DELAYS["lognormal"]), ("timing", clock.TIMINGS["buffer"]),
                          ("compress", COMPRESSORS["topk"]), ("topology", peers.TOPOLOGIES["gossip"]))],
    # comparisons and sweeps
    (lambda: compare({"mine": OfTorch()}, updates=1), r"^methods\['mine'\] = 'a OfTorch': must be a name or a Method"),
    (lambda: compare([OfTorch()], updates=1), "^method = .*: must be a name or a Method"),
    (lambda: compare([named("mine", lambda: None)], updates=1), "^method = .*: must be a name or a Method"),
    (lambda: sweep(Settings(updates=1), {"delay": [WithDropout()]}),
     "^delay = 'a WithDropout': must be a name or a delay model"),
    # parts of objects
    (lambda: simulate(**SMALL, method=Method(OfTorch())), "^method.rule = 'a OfTorch': must be a ServerAlgorithm, a"),
    (lambda: simulate(**SMALL, metrics={"top": Speechless()}),
     r"^metrics\['top'\] = 'a Speechless': must be f\(outputs, y\)"),
    (lambda: simulate(**SMALL, lr=jax.random.key(0)), "^lr = .*key.*: must be a finite number > 0"),
    (lambda: simulate(**SMALL | {"model": models.make("linear", input_shape=(4,))._replace(loss=3)}),
     "^model.loss = '3': must be a func"),
    *[(lambda wrong=wrong: simulate(**SMALL, progress=wrong), "^progress = .*: must be True, False, None, or a")
      for wrong in (OfTorch(), lambda done, total: None, 3)],
]  # fmt: skip


def test_a_part_that_cannot_be_read_is_named_by_its_fingerprint():
    """For objects that reach it all the same, inside a function or a Method."""
    tensor = Tensor()
    is_refused(r"^fingerprint of .*'s tensor = .*Tensor .*: must be .*requires grad", fingerprint, lambda x: tensor)
    delay = Settings(delay=lambda num_clients, seed: tensor, updates=2).delay
    assert str(delay) == "(object)"
    assert delay.fingerprint is None


def test_fingerprints_of_nnx_modules_read_their_keys():
    class Seeded(nnx.Module):
        def __init__(self, seed):
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))

    assert fingerprint(Seeded(0)) == fingerprint(Seeded(0)) != fingerprint(Seeded(1))


def planned(timing="every", delays="constant", **until):
    return clock.plan(timing, delays, num_clients=3, local_steps=1, until=clock.Until(**until))


CALLS = [
    (lambda: simulate(**SMALL, eval_at=[10, 20]), f"eval_at = [10, 20]: {MOMENTS}"),
    (lambda: simulate(**SMALL, eval_at=10), f"eval_at = 10: {MOMENTS}"),
    (lambda: simulate(**SMALL, feedback=5), "feedback = 5: must be a text such as 'ef'"),
    (lambda: simulate(**SMALL, memory_limit=4e9), "memory_limit = 4000000000.0: must be a text such as '4GB'"),
    (lambda: simulate("fedavg"), "settings = 'fedavg': must be Settings; a single setting is a keyword"),
    (lambda: simulate(**SMALL, out=5), "out = 5: must be a path"),
    (lambda: simulate(**SMALL, out=""), "out = '': must be a path"),
    (lambda: simulate(**SMALL, timing=lambda scenario: planned(updates=6)),
     "num_clients of timing's schedule = 3: must be 4, as in the scenario"),
    (lambda: simulate(**SMALL, out="one\n"), "out = 'one\\n': must be a path without control characters"),
    (lambda: simulate(**SMALL, out="a\0b"), "out = 'a\\x00b': must be a path without control characters"),
    (lambda: simulate(**SMALL, plots="maybe"), "plots = 'maybe': must be True or False"),
    (lambda: simulate(**SMALL, overwrite=1, out="one"), "overwrite = 1: must be True or False"),
    (lambda: simulate(**SMALL, stream=3, out="one"), "stream = 3: must be 'csv', 'tensorboard' or 'wandb', or a list"),
    (lambda: simulate(**SMALL, stream="csv,csv", out="one"), "stream = 'csv,csv': must be different streams"),
    (lambda: simulate(**SMALL, eval_at="5,3"), "eval_at = '5,3': must be in increasing order"),
    (lambda: simulate(**SMALL, eval_at="1_0"), f"eval_at = '1_0': {MOMENTS}"),
    (lambda: simulate(**SMALL, method="fedasync:"), "method = 'fedasync:': must be without the colon"),
    (lambda: sweep(SMALL, {"lr": 0.1}), "lr = 0.1: must be a list of values in a grid"),
    (lambda: sweep(SMALL, {"lr": [0.1]}, roles=3), "roles = 3: must be a mapping, swept setting -> role"),
    (lambda: resume(5), "folder = 5: must be a path"),
    (lambda: resume(""), "folder = '': must be a path"),
    (lambda: results.load(5), "folder = 5: must be a path"),
    (lambda: results.save(5, "nowhere"), "run = 5: must be a Run"),
    (lambda: compare("fedavg", Settings(**SMALL)), "methods = 'fedavg': must be a list of methods"),
    (lambda: compare(["fedavg"], SMALL), "settings = {"),
    (lambda: compare(["fedavg"], Settings(**SMALL), out=""), "out = '': must be a path"),
    (lambda: compare(["fedavg"], Settings(**SMALL), seeds=[3, 4]),
     "seeds = [3, 4]: must be a whole number from 1 to 100000, the number of seeds, from the setting seed on"),
    (lambda: compare(["fedavg"], Settings(**SMALL), progress="yes"), "progress = 'yes': must be True, False, None, or"),
    (lambda: sweep(SMALL, {"lr": [LARGE]}), "lr = 1"),
    (lambda: sweep(SMALL, {"lr": [0.1]}, seeds=[0.5]), "seeds = 0.5: must be a whole number"),
    (lambda: sweep(SMALL, {"lr": [0.1]}, points={"lr": 0.1}), "points = {'lr': 0.1}: must be a list of mappings"),
    (lambda: sweep(SMALL, {"lr": [0.1]}, points=5), "points = 5: must be a list of mappings"),
    (lambda: sweep(SMALL, {"lr": [0.1]}, out=5), "out = 5: must be a path"),
    (lambda: sweep(SMALL, {"eval_at": [10, 20]}), f"eval_at = 10: {MOMENTS}"),
    (lambda: simulate(**SMALL, learning_rate=0.1), "setting = 'learning_rate': unknown; did you mean 'lr'?"),
    (lambda: simulate(**SMALL, proximal=0.1), "proximal = 0.1: must be an option of the method, as in method="),
    (lambda: simulate(**SMALL, method="fedbuff", size=5), "size = 5: must be an option of the timing, as in method="),
    (lambda: simulate(**SMALL, timing="buffer", size=5), "size = 5: must be an option of the setting timing, as "),
    (lambda: simulate(**SMALL, compress="topk", ratio=0.1), "ratio = 0.1: must be an option of the setting com"),
    (lambda: simulate(**SMALL, method="orthodyn:phases=2"), "phases = 2: must be two or three names joined by +"),
    (lambda: simulate(**SMALL, partition="natural:groups=2"), "groups = 2: must be an array: the owner of each exa"),
    (lambda: simulate(**SMALL, method="dpsgd", topology="erdos_renyi:p=1e-300"), "topology: p = 1e-300: none of 100"),
    (lambda: simulate(**SMALL, network="link:down=9,heterogeneity=30"), "network = 'link:down=9,heterogeneity=30': "),
    (lambda: simulate(**SMALL, network="link:down=9,jitter=30"), "network = 'link:down=9,jitter=30': jitter = 30: mu"),
    (lambda: simulate(**SMALL, compress="qsgd:bucket=3000000000"), "compress = 'qsgd:bucket=3000000000': bucket = 3"),
    (lambda: simulate(**SMALL, compress="centroids:max_iter=3000000000"), "compress = 'centroids:max_iter=30000000"),
    (lambda: simulate(**SMALL, dataset="synthetic:seed=none"), "dataset = 'synthetic:seed=none': seed = None: must "),
    (lambda: simulate(**SMALL, dataset="quadratic:seed=2.5"), "dataset = 'quadratic:seed=2.5': seed = 2.5: must be "),
    (lambda: simulate(**SMALL, dataset="synthetic:same_model=no"), "dataset = 'synthetic:same_model=no': same_model "),
    (lambda: simulate(**SMALL, dataset="tfds:name=2.5"), "dataset = 'tfds:name=2.5': name = 2.5: must be a TFDS nam"),
    (lambda: simulate(**SMALL, timing="size=5"), "timing = 'size=5': must begin with a name, as in buffer:size"),
    (lambda: simulate(**SMALL, partition="non-iid"), "partition = 'non-iid': unknown (known: iid, dirichlet, "),
    (lambda: compare(["fedavg,asgd"], Settings(**SMALL)), "method = 'fedavg,asgd': must be without commas betw"),
    (lambda: sweep({**SMALL, "lr": [0.1, 0.2]}), "lr = [0.1, 0.2]: must be a number or none (a list of values t"),
    (lambda: compare(["asgd"], Settings(**SMALL), target=0.7), "target = 0.7: must be left out: tables have it, as i"),
    (lambda: prepare("fedavg"), "settings = 'fedavg': must be Settings, such as Settings(method='fedavg', updates"),
    (lambda: Settings(**SMALL, gibberish=1), "setting = 'gibberish': unknown; the nearest names are 'metrics'"),
    (lambda: Settings(rounds=5), "setting = 'rounds': unknown; did you mean 'server_steps'?"),
    (lambda: simulate(**SMALL, clients_per_round=5), "setting = 'clients_per_round': unknown; did you mean timing='c"),
    (lambda: simulate(**SMALL, output="x"), "setting = 'output': unknown; did you mean 'out'?"),
    (lambda: simulate(**SMALL, seeds=3), "seeds = 3: must be left out: a run has one seed; compare(methods"),
    (lambda: simulate(model="logistic"), "time, updates, server_steps = None: give at least one, or the run has no"),
    (lambda: sweep({**SMALL, "method": "fedbuff"}, {"method.size": [3]}),
     "setting = 'method.size': fedbuff has no option 'size'; did you mean 'timing.size'?"),
    (lambda: simulate(**SMALL | {"clients": 1}, method="pushcen"), "clients = 1: must be at least 2: a single node"),
    (lambda: results.load(__file__), f"folder = {__file__!r}: must hold a saved run, as --out or"),
    (lambda: tune(SMALL, ["lr"]), "settings = {'model': 'logistic', 'clients': 4, 'updates': 6}: must be Settings"),
    (lambda: curl_probe(3), "experiment = 3: must be that of a method with a server"),
    (lambda: simulate(**SMALL, method=Method(full_models, exchange=3)), "method.exchange = 3: must be a text, a name"),
    (lambda: simulate(**SMALL, method=Method(full_models, timing="every")), "method.timing = 'every': must be left ou"),
    (lambda: simulate(**SMALL, method=Method(server.asgd, exchange="mean")), "method.exchange = 'mean': must be left "),
    (lambda: trajectory("fedasync"), "settings = 'fedasync': must be Settings, such as"),
    (lambda: trajectory(Settings(**SMALL), modl="mlp"), "object = 'modl': unknown; did you mean 'model'?"),
    (lambda: planned(updates=LARGE), "until.updates = 1"),
    (lambda: planned(time=LARGE), "until.time = 1"),
    (lambda: planned(updates=10**13), "updates = 1e+13: must end within"),
    (lambda: planned(timing=None, updates=3), "timing = None: must be a name of TIMINGS or a model"),
    (lambda: planned(delays=None, updates=3), "delays = None: must be a name of DELAYS or a model"),
    (lambda: evaluation_points(planned(updates=9), Every(at=["a"])), "eval_at = 'a': must be a finite number >= 0"),
    (lambda: evaluation_points(planned(updates=9), Every(at=np.zeros(1_000_001))), "eval_at = '1000001 moments'"),
    (lambda: evaluation_points(planned(updates=9), Every(time=1, steps=2)), "eval_time = 1, eval_steps = 2: give"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), OBJECTS + CALLS, ids=range(len(OBJECTS + CALLS)))
def test_wrong_values_are_one_line(call, says, tmp_path, monkeypatch):
    """``says`` is how the error begins, or a pattern of that."""
    monkeypatch.chdir(tmp_path)
    said = refusal(call)
    assert (said.startswith(says) or re.match(says, said)) and len(said) < 400
    assert not list(tmp_path.iterdir())


def test_a_grid_is_refused_by_the_smallest_step_that_is_named():
    """The step that the message names is accepted, for any length of the run."""
    schedule = planned(time=510.0)
    for end in (510.382, 999.9, 1.0, 77.77):
        said = refusal(evaluation_points, schedule, Every(time=end / 1.01e6), horizon=end)
        assert said.startswith("eval_time")
        step = float(said.partition("must be ")[2].partition(" or more")[0])
        assert end / 1e6 <= step <= 1.02 * end / 1e6
    assert len(evaluation_points(schedule, Every(time=step * 100), horizon=end).time) > 9800


@pytest.mark.parametrize(
    ("method", "timing", "said"),
    [
        ("quafl:size=3", None, "size of quafl = 3: must be 10, as in its timing polling"),
        ("quafl", "polling:size=3", "size of quafl = 10: must be 3, as in its timing polling:size=3"),
        ("quafl+swa@polling:size=3", None, "size of quafl = 10: must be 3"),
        ("port@hurry:bound=2", None, "bound of port = 10.*: must be 2, as in its timing hurry:bound=2"),
    ],
)
def test_an_option_that_rule_and_timing_share_has_one_value(method, timing, said):
    is_refused(said, lambda: prepare(Settings(method=method, timing=timing, clients=12, updates=20)))
    prepare(Settings(method="quafl:size=3@polling:size=3", clients=12, updates=20))
    prepare(Settings(method="quafl:size=3", timing="every", clients=12, updates=20))  # which has no such option
