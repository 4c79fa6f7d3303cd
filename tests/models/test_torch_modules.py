"""Modules of PyTorch as they are: equal to PyTorch in values, gradients, jobs and statistics. Needs torch."""

from __future__ import annotations

import copy
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedjax_async import bridges, named, register, simulate
from fedjax_async.base import registry
from fedjax_async.base.fingerprints import fingerprint
from fedjax_async.base.notices import RunWarning
from fedjax_async.local import local_training, run_job
from fedjax_async.local.batches import seed_of
from fedjax_async.models import from_flax, from_torch, from_torch_module, in_dtype, read_arrays, to_torch
from fedjax_async.types import ClientData, Message
from tests.local import textbook
from tests.models import torch_networks as networks
from tests.refusals import refusals
from tests.told import refusal

KEY, BATCH, LR = jax.random.key(3), 8, 0.1
# network -> shape of an example as PyTorch has it, and as rows are here
CASES = {
    "LeNet": ((1, 28, 28), (28, 28)), "MLP": ((4,), (4,)), "Small": ((2, 6, 6), (6, 6, 2)),
    "Residual": ((3, 9, 9), (9, 9, 3)), "Many": ((3, 8, 8), (8, 8, 3)), "Attention": ((6, 8), (6, 8)),
    "Sequence": ((2, 6), (6, 2)), "Patches": ((3, 8, 8), (8, 8, 3)), "Orders": ((2, 21, 21), (21, 21, 2)),
    "Tied": ((4,), (4,)), "Corners": ((4,), (4,)), "Text": ((5,), (5,)),
}  # fmt: skip


def made(name, **options):
    torch.manual_seed(0)
    return getattr(networks, name)(**options)


def examples(name, size, seed=0):
    """A batch in PyTorch's layout, the same as rows, and labels."""
    there, here = CASES[name]
    chance = np.random.default_rng(seed)
    x = chance.integers(0, 11, (size, *there)) if name == "Text" else chance.normal(size=(size, *there))
    rows = x if len(there) == len(here) == 1 or name == "Attention" else np.moveaxis(x, 1, -1)
    return x, rows.reshape(size, *here), chance.integers(0, 3, size).astype(np.int32)


def as_double(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)


@pytest.mark.float64
@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_loss_and_gradients_are_pytorchs(name, train):
    net = made(name).train(train)
    x, rows, y = examples(name, 5)
    model = from_torch_module(net)
    params = as_double(model.init(KEY))
    net.double()
    given, labels = torch.from_numpy(x), torch.from_numpy(y).long()

    def loss(weights):
        held = weights if model.train is None else {**params, "params": weights}
        outputs = model.apply(held, jnp.asarray(rows), KEY if train else None)
        return model.loss(outputs, jnp.asarray(y)).mean(), outputs

    weights = params if model.train is None else params["params"]
    (value, outputs), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    want = net(given)
    there = F.cross_entropy(want, labels)
    there.backward()
    np.testing.assert_allclose(outputs, want.detach().numpy(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(value, there.item(), rtol=1e-7)
    wanted = {name: one.grad for name, one in net.named_parameters() if one.requires_grad}
    found = to_torch(gradient)
    assert set(found) == set(wanted)
    for path, one in wanted.items():
        np.testing.assert_allclose(found[path], one.numpy(), rtol=1e-5, atol=1e-8, err_msg=path)


@pytest.mark.float64
@pytest.mark.parametrize(("name", "size"), [
    ("LeNet", BATCH + 1), ("Small", 2), ("Small", BATCH), ("Small", BATCH + 1), ("MLP", 2), ("MLP", BATCH),
    ("MLP", BATCH + 2),
])  # fmt: skip
def test_a_job_is_pytorchs_loop_over_unpadded_batches(name, size):
    """Weights and statistics; the statistics of a batch of one example are not taken."""
    net = made(name)
    x, rows, y = examples(name, size)
    model = from_torch_module(net)
    params, steps = as_double(model.init(KEY)), 2 * -(-size // BATCH)
    data = ClientData(jnp.asarray(rows), jnp.asarray(y), jnp.arange(size), jnp.int32(0), jnp.int32(size))
    client = local_training(model, optimizer=optax.sgd(LR), batch_size=BATCH)
    upload, _ = run_job(client, KEY, Message(params), (), data, steps)
    after = to_torch(jax.tree.map(lambda a, b: a + b, params, upload))

    net.double().train()
    optimizer = torch.optim.SGD(net.parameters(), LR)
    for chosen in textbook.batches(tuple(int(word) for word in seed_of(KEY)), size, BATCH, steps):
        before = {name: one.clone() for name, one in net.named_buffers()}
        optimizer.zero_grad()
        F.cross_entropy(net(torch.from_numpy(x[chosen])), torch.from_numpy(y[chosen]).long()).backward()
        optimizer.step()
        if len(chosen) == 1:
            net.load_state_dict(before, strict=False)
    for path, one in net.state_dict().items():
        if not path.endswith("num_batches_tracked"):
            np.testing.assert_allclose(after[path], one.numpy(), rtol=1e-6, atol=1e-9, err_msg=path)


def test_evaluation_takes_any_number_of_examples_and_keeps_the_statistics():
    model = from_torch_module(made("MLP"))
    params, (_, x, _) = model.init(KEY), examples("MLP", 7)
    whole = model.apply(params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(whole[:1], model.apply(params, jnp.asarray(x[:1], jnp.float32)), rtol=1e-5)
    _, changed = model.train(params, jnp.asarray(x, jnp.float32), KEY, jnp.ones(7))
    assert set(changed["batch_stats"]["1"]) == {"running_mean", "running_var"}
    assert np.abs(model.apply(changed, jnp.asarray(x, jnp.float32)) - whole).max() > 1e-3


def test_statistics_are_those_of_float32_whatever_it_computes_in():
    model = from_torch_module(nn.Sequential(nn.BatchNorm1d(2, momentum=1.0), nn.Linear(2, 3)))
    x = np.random.default_rng(0).normal(100, 1, (64, 2)).astype(jnp.bfloat16)
    _, after = in_dtype(model, jnp.bfloat16).train(model.init(KEY), jnp.asarray(x), KEY, jnp.ones(64, bool))
    found, exact = after["batch_stats"]["0"], x.astype(np.float64)
    np.testing.assert_allclose(found["running_mean"], exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["running_var"], exact.var(0, ddof=1), rtol=1e-4)


def test_dropout_follows_the_key_and_is_off_without_one():
    model = from_torch_module(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.25), nn.Identity()))
    params, x = {"0": {"weight": jnp.eye(4)}}, jnp.ones((500, 4))
    one, again, other = (model.apply(params, x, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.any(one != other)
    assert set(np.unique(one)) == {np.float32(0), np.float32(1 / 0.75)} and abs(np.mean(one == 0) - 0.25) < 0.04
    np.testing.assert_array_equal(model.apply(params, x), x)


def test_embeddings_lack_rows_frozen_weights_are_constants_and_shared_weights_are_one():
    model = from_torch_module(nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(2, 3)))
    out = model.apply(model.init(KEY), jnp.array([[3], [4], [-1]]))
    assert np.isfinite(out).all(axis=1).tolist() == [True, False, False], "rows that it lacks are not others"
    params, shared = (from_torch_module(made(name)).init(KEY) for name in ("Text", "Tied"))
    assert set(params) == {"embedding", "encoder", "output"} and set(params["output"]) == {"bias"}
    assert set(shared["first"]) == {"weight", "bias"} and set(shared["second"]) == {"bias"}


WORLD = {
    "dataset": "fashion_mnist_6k", "method": "fedasync", "partition": "iid", "clients": 4, "updates": 12, "steps": 20,
    "lr": 0.1, "eval_examples": 500, "compute": "float64",
}  # fmt: skip
SMALL = {"method": "asgd", "dataset": "synthetic:features=6", "clients": 3, "updates": 3}
quietly = pytest.mark.filterwarnings("ignore:model. a torch module starts:UserWarning")


@quietly
@pytest.mark.float64
def test_a_run_is_that_of_the_flax_twin_and_its_weights_load_into_the_module(tmp_path):
    net = made("LeNet")
    run = simulate(model=named("lenet", net), **WORLD)
    twin = from_flax(networks.Twin(), input_shape=(28, 28, 1))
    start = from_torch(net.state_dict(), twin.init(KEY), flattened={"fc1": 16})
    other = simulate(model=twin, initial=start, **WORLD)
    np.testing.assert_allclose(run.evaluations["loss"], other.evaluations["loss"], rtol=1e-9)
    np.testing.assert_array_equal(run.evaluations["accuracy"], other.evaluations["accuracy"])
    assert run.evaluations["loss"][-1] < run.evaluations["loss"][0] - 0.01

    state = read_arrays(bridges.export(run, tmp_path / "w.safetensors", names="torch"))
    loaded = copy.deepcopy(net).double()
    loaded.load_state_dict({name: torch.from_numpy(np.array(one)) for name, one in state.items()})
    np.testing.assert_array_equal(loaded.fc2.weight.detach(), run.params["fc2"]["weight"])
    torch.save(loaded.state_dict(), tmp_path / "w.pt")
    further = simulate(model=named("lenet", net), initial=str(tmp_path / "w.pt"), **WORLD | {"updates": 1})
    np.testing.assert_allclose(further.evaluations["loss"][0], run.evaluations["loss"][-1], rtol=1e-6)


def test_a_class_starts_each_seed_from_other_weights_and_a_module_says_that_it_does_not():
    class Net(nn.Sequential):
        def __init__(self, width=4):
            super().__init__(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 10))

    before = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunWarning)
        runs = [simulate(model=model, seed=seed, **SMALL).params for model, seed in (
            (Net, 0), (Net, 1), (Net, 0), (from_torch_module(lambda: Net(4)), 0))]  # fmt: skip
    assert torch.equal(before, torch.random.get_rng_state())
    first, second, again, by_hand = (run["0"]["weight"] for run in runs)
    assert np.abs(first - second).max() > 1e-2
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, by_hand)
    with pytest.warns(RunWarning, match=r"a torch module starts .* models.from_torch_module\(lambda: Net\(\)\)"):
        simulate(model=Net(), **SMALL)
    with pytest.raises(ValueError, match=r"model = 'a function': .*of PyTorch, models\.from_torch_module\(f\)"):
        simulate(model=lambda: Net(4), **SMALL)


@quietly
@pytest.mark.parametrize("options", [{"compute": "bfloat16"}, {"remat": True}, {"personal": "4/*"}])
def test_settings_of_models_take_it(options):
    net = made("MLP", features=6, classes=10, rate=0.1)
    run = simulate(model=net, partition="iid", batch_size=16, **SMALL | {"updates": 6}, **options)
    assert np.isfinite(run.evaluations["loss"]).all()


def test_fingerprints_tell_modules_apart():
    net = made("MLP")
    same, weights, rate = copy.deepcopy(net), copy.deepcopy(net), made("MLP", rate=0.5)
    weights[0].bias.data += 1
    assert fingerprint(net) == fingerprint(same) and len({*map(fingerprint, (net, weights, rate))}) == 3
    models = [from_torch_module(one) for one in (net, same, weights)]
    found = [fingerprint(model) for model in models]
    assert found[0] == found[1] != found[2]
    models[0].apply(models[0].init(KEY), jnp.ones((2, 4)))
    assert fingerprint(models[0]) == found[0]


class Function(nn.Module):
    """A layer and what a function makes of its outputs."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.layer, self.function = layer or nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


def test_what_depends_on_the_number_of_examples_is_done_for_that_number():
    net = Function(lambda x: x * len(x) if x.shape[0] % 2 == 0 or x.shape[0] > 6 else x.relu())
    model = from_torch_module(net)
    for size in (2, 3, 4, 5, 7):
        x = np.random.default_rng(0).normal(size=(size, 4)).astype(np.float32)
        want = net(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(model.apply(model.init(KEY), jnp.asarray(x)), want, rtol=1e-5, atol=1e-6)


class Counting(nn.Module):
    """Changes a buffer of its own, by itself or through a view."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if self.how == "assigned":
            self.seen = self.seen + 1
        else:
            (self.seen if self.how == "changed" else self.seen.view(2, 2)).add_(1)
        return self.layer(x)


def shown_in_place(x):
    y = x.view(-1)
    y.add_(1)
    return x


def traced(net):
    """The shapes of the outputs for three examples of four numbers."""
    model = from_torch_module(net)
    return jax.eval_shape(model.apply, model.init(KEY), jax.ShapeDtypeStruct((3, 4), jnp.float32), KEY)


test_what_has_no_counterpart_is_refused_by_name = refusals(
    (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.GRU(2, 3, batch_first=True)), r"module = 'aten.gru.input in 1 \(GRU\)'"),
    (Function(torch.cumprod), "module = Function: must be a module that torch.export takes, .* TypeError"),
    (Function(lambda x: torch.cumprod(x, 1)), r"operation of module = 'aten.cumprod.default in forward \(Function\)'"),
    (Function(lambda x: x.view(2, 4)), r"inputs of the shape \(3, 4\); it raised RuntimeError: shape '\[2, 4\]'"),
    (Function(shown_in_place), "aten.add_.Tensor in .*, of which .* is another name': must be without a change"),
    (Counting("assigned"), "operation of module = 'aten.copy_.default in forward"),
    (Counting("changed"), "aten.add_.Tensor in .*, which changes seen': must be without a change"),
    (Counting("shown"), "aten.add_.Tensor in .*, which changes seen': must be without a change"),
    (Function(lambda x: (x, x)), "outputs of module = '2 of Function': must be one tensor"),
    (Function(lambda x: x + torch.rand(4)), "operation of module = 'aten.rand.default"),
    (Function(nn.BatchNorm1d(4, track_running_stats=False)), "running statistics of function .BatchNorm1d. = "),
    (Function(nn.BatchNorm1d(4, momentum=None)), "momentum of function = None: must be a number"),
    (Function(torch.relu, nn.Linear(5, 4)), r"inputs of the shape \(B, 4\); it raised RuntimeError: "),
    (nn.ReLU(), "module = 'ReLU': must be a module with parameters that are trained"),
    (lambda: 3, "module = 'int': must be a torch.nn.Module, or a factory"),
    (3, "module = 'int': must be a torch.nn.Module, or a factory"),
    by=traced,
)


@quietly
def test_a_loss_of_torch_and_wrong_inputs_in_a_run_are_one_line():
    said = refusal(from_torch_module, nn.Linear(2, 2), loss=nn.CrossEntropyLoss())
    assert "loss = 'CrossEntropyLoss': must be a function of JAX" in said
    said = refusal(simulate, model=nn.Linear(5, 10), **SMALL)
    assert re.search(r"for inputs of the shape \(B, 6\); it raised RuntimeError: a and b must", said)


@quietly
def test_what_a_registered_factory_makes_starts_from_the_seed_as_the_class_does(monkeypatch):
    monkeypatch.setattr(registry, "ADDED", {})
    register("model", "own_torch")(lambda *, outputs=10: nn.Linear(6, outputs))
    torch.manual_seed(1)
    first = simulate(model="own_torch:outputs=10", **SMALL)
    torch.manual_seed(2)
    registry.forget()
    again, other = (simulate(model="own_torch:outputs=10", **SMALL | {"seed": seed}) for seed in (0, 1))
    same = simulate(model=from_torch_module(lambda: nn.Linear(6, 10)), **SMALL)
    for run in (again, same):
        np.testing.assert_array_equal(run.evaluations["loss"], first.evaluations["loss"])
    assert other.evaluations["loss"][0] != first.evaluations["loss"][0]


@quietly
def test_a_registered_factory_may_return_a_class_or_always_the_same_module(monkeypatch):
    monkeypatch.setattr(registry, "ADDED", {})
    net = nn.Linear(6, 10)
    register("model", "own_shared")(lambda: net)
    register("model", "own_partial")(lambda *, outputs=10: functools.partial(nn.Linear, 6, outputs))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = simulate(model="own_shared", **SMALL)
    assert any("starts from the weights that it was made with" in str(one.message) for one in said)
    same = simulate(model=net, **SMALL)
    np.testing.assert_array_equal(run.evaluations["loss"], same.evaluations["loss"])
    drawn = [simulate(model="own_partial", **SMALL | {"seed": seed}).evaluations["loss"][0] for seed in (0, 1)]
    assert drawn[0] != drawn[1]


def test_images_are_turned_only_where_the_first_layer_takes_channels_first():
    pixels = np.random.default_rng(0).normal(size=(2, 3, 3, 2)).astype(np.float32)
    net = nn.Sequential(nn.Flatten(), nn.Linear(18, 3))
    for turned, x in ((None, pixels), (True, pixels.transpose(0, 3, 1, 2))):
        model = from_torch_module(net, channels_first=turned)
        found = model.apply(model.init(KEY), jnp.asarray(pixels))
        np.testing.assert_allclose(found, net(torch.from_numpy(x.copy())).detach().numpy(), rtol=1e-5, atol=1e-6)
