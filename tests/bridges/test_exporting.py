"""Exporting a run's model and starting runs from the file, with our names and with PyTorch's."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async import Settings, cli, data, models, named, simulate
from fedjax_async.bridges import export
from fedjax_async.config import prepare
from fedjax_async.config.grid import expand
from fedjax_async.config.resolving import resolved
from fedjax_async.config.settings import as_dict
from fedjax_async.models import read_arrays, to_torch, write_arrays
from fedjax_async.results import save
from tests.cli.called import refused
from tests.told import same

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (60, 4, 4, 3)).astype(np.uint8), np.arange(60, dtype=np.int32) % 3
IMAGES = data.Dataset("images", X, Y, X[:12], Y[:12])
SMALL = {"dataset": IMAGES, "model": "logistic", "clients": 3, "steps": 2, "batch_size": 4, "partition": "iid"}
SERVED = {**SMALL, "updates": 6, "eval_updates": 6, "lr": 0.1, "engine": "reference"}
EXPORTED = {"names": "torch", "flattened": {"output": 3}}  # given, because a user's own data set has no name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = simulate(**SERVED)
    folder = tmp_path_factory.mktemp("trained") / "run"
    save(run, folder)
    return run, folder


def started(initial, **changes):
    return prepare(Settings(**SERVED | changes, initial=initial)).params


def test_a_run_starts_from_every_form_of_anothers_end(trained, tmp_path):
    run, folder = trained
    files = [export(run, tmp_path / "own.npz"), export(folder, tmp_path / "own.safetensors")]
    files.append(export(run, tmp_path / "torch.safetensors", **EXPORTED))
    files.append(export(run, tmp_path / "torch.npz", **EXPORTED))
    for initial in (*map(str, files), str(folder), run.params, named("pretrained", run.params)):
        same(started(initial), run.params)


def test_names_of_pytorch_are_those_asked_for(trained, tmp_path):
    run, _ = trained
    path = export(run, tmp_path / "w.safetensors", **EXPORTED, modules={"output": "net.1"})
    found = read_arrays(path)
    assert sorted(found) == ["net.1.bias", "net.1.weight"]
    want = to_torch(run.params, flattened={"output": 3})["output.weight"]
    np.testing.assert_array_equal(found["net.1.weight"], want)
    same(started(str(path), initial_rename="output=net.1"), run.params)
    for initial, rename, says in (
        (
            path,
            None,
            r".*w\.safetensors': names in the file = 'net.1.bias, net.1.weight': must be .* initial_rename=LAY",
        ),
        (path, "output=net.2", r".*w\.safetensors': shape of net.1.bias in the file = .*: must be none, as the model"),
        (path, "fc9=net.1", r".*w\.safetensors': initial_rename = 'fc9': must be one of the layers: output"),
        (None, "output=a", "^initial_rename = 'output=a': must be left out with"),
        (run.params, "output=a", "^initial_rename = 'output=a': must be left out with"),
    ):
        with pytest.raises(ValueError, match=says):
            started(str(initial) if initial is path else initial, initial_rename=rename)


def test_runs_of_a_sweep_start_from_weights_of_their_own(trained, tmp_path):
    run, folder = trained
    other = write_arrays(tmp_path / "zeros.npz", {k: 0 * v for k, v in read_arrays(folder / "params.npz").items()})
    first, second = expand(SERVED, {"initial": [str(folder), str(other)]})
    same(prepare(first.settings).params, run.params)
    same(prepare(second.settings).params, jax.tree.map(np.zeros_like, run.params))


def test_nodes_start_from_weights_too_and_their_mean_or_one_of_them_is_written(trained, tmp_path):
    run, folder = trained
    nodes = {**SMALL, "method": "async_dfedavg", "delay": "exponential", "updates": 6, "test_fraction": 0.2}
    begun = prepare(Settings(**nodes, initial=str(folder)))
    same(begun.params, run.params)
    params = jax.tree.map(lambda leaf: np.stack([leaf, leaf + 2]), run.params)
    each = run._replace(params=params, schedule=begun.schedule)
    mean, second = export(each, tmp_path / "mean.npz"), export(each, tmp_path / "one.npz", node=1)
    bias = run.params["output"]["bias"]
    np.testing.assert_allclose(read_arrays(mean)["output/bias"], bias + 1, rtol=1e-6)
    np.testing.assert_array_equal(read_arrays(second)["output/bias"], bias + np.float32(2))
    with pytest.raises(ValueError, match=r"^node = 3: must be a whole number from 0 to 2"):
        export(each, tmp_path / "none.npz", node=3)


def test_the_params_of_a_module_of_pytorch_need_neither_it_nor_its_data(trained, tmp_path):
    run, _ = trained
    own = run._replace(params={"net.0.weight": np.ones((3, 2), np.float32)})
    for names in ("own", "torch"):
        path = export(own, tmp_path / f"{names}.npz", names=names)
        np.testing.assert_array_equal(read_arrays(path)["net.0.weight"], own.params["net.0.weight"])


def test_a_model_of_ones_own_that_is_not_loaded_is_exported_with_its_maps_given(tmp_path):
    model = named("own", models.make("logistic"))
    simulate(**SERVED | {"dataset": "fashion_mnist_6k", "model": model}, out=tmp_path / "run", plots=False)
    says = r"^flattened = None: must be \{layer: channels\}, since the model is your own"
    with pytest.raises(ValueError, match=says):
        export(tmp_path / "run", tmp_path / "w.npz", names="torch")
    export(tmp_path / "run", tmp_path / "w.npz", names="torch", flattened={})


def test_what_cannot_be_used_is_named(trained, tmp_path):
    run, _ = trained
    path = export(run, tmp_path / "w.npz")
    for options, says in (
        ({"overwrite": False}, r"^to = '.*w\.npz': must be a new file"),
        ({"names": "pytorch"}, "^names = 'pytorch': "),
        ({"modules": {"output": "0"}}, r"^modules = \{'output': '0'\}: must be left out without names = torch"),
        ({"best": True}, "^best = True: must be left out"),
        ({"node": 1}, "^node = 1: must be left out: the run has a server"),
    ):
        with pytest.raises(ValueError, match=says):
            export(run, path, **{"overwrite": True} | options)
    for initial, changes, says in (
        (
            str(path),
            {"model": "mlp:hidden=8"},
            r"^initial = '.*w\.npz': shape of fc1/bias in the file = 'none': must be",
        ),
        ({"fc1": 3}, {}, "^initial = .*: must be a text, or a pytree of arrays"),
        ("missing.npz", {}, r"^initial = 'missing\.npz': must be a file of weights \(.npz, .*folder"),
    ):
        with pytest.raises(ValueError, match=says):
            started(initial, **changes)
    with pytest.raises(ValueError, match=r"^initial = '\(object: \w+\)': must have a name for a folder"):
        simulate(**SERVED, initial=run.params, out=tmp_path / "run", plots=False)


def test_the_command_writes_what_the_function_does(trained, tmp_path, capsys):
    folder, to = tmp_path / "run", tmp_path / "w.safetensors"
    settings = as_dict(resolved(Settings(model="logistic", clients=3, updates=3)))
    kernel = RNG.normal(size=(784, 10)).astype(np.float32)
    run = trained[0]._replace(settings=settings, params={"output": {"kernel": kernel, "bias": kernel[0]}})
    save(run, folder)
    assert cli.main(["export", str(folder), "--to", str(to), "--names", "torch", "--rename", "output=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1.weight", "float32", "[10,", "784]"]
    assert lines[-1] == f"written: {to}, 7,850 numbers"
    np.testing.assert_array_equal(read_arrays(to)["1.weight"], kernel.T)
    assert "error: to = " in refused(capsys, "export", str(folder), "--to", str(to))
    for names, rename, says in (
        ("torch", "output", "rename = 'output': must be LAYER=NAME"),
        ("torch", "output=1,output=2", "rename = 'output=1,output=2': must be LAYER=NAME, each layer once"),
        ("torch", "fc9=1", "rename = 'fc9': must be one of the layers: output"),
        ("own", "fc9=1", "rename = 'fc9=1': must be left out without --names torch"),
    ):
        flags = ["--to", str(to), "--overwrite", "--names", names, "--rename", rename]
        assert says in refused(capsys, "export", str(folder), *flags)
