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

RNG = np.random.default_rng(0)
IMAGES = data.Dataset(
    "images",
    *(RNG.integers(0, 256, (60, 4, 4, 3)).astype(np.uint8), np.arange(60, dtype=np.int32) % 3),
    *(RNG.integers(0, 256, (12, 4, 4, 3)).astype(np.uint8), np.arange(12, dtype=np.int32) % 3),
)
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
    return jax.tree.map(np.asarray, prepare(Settings(**SERVED | changes, initial=initial)).params)


def test_a_run_starts_from_every_form_of_anothers_end(trained, tmp_path):
    run, folder = trained
    files = [export(run, tmp_path / "own.npz"), export(folder, tmp_path / "own.safetensors")]
    files.append(export(run, tmp_path / "torch.safetensors", **EXPORTED))
    files.append(export(run, tmp_path / "torch.npz", **EXPORTED))
    for initial in (*map(str, files), str(folder), run.params, named("pretrained", run.params)):
        jax.tree.map(np.testing.assert_array_equal, started(initial), run.params)


def test_names_of_pytorch_are_those_asked_for(trained, tmp_path):
    run, _ = trained
    path = export(run, tmp_path / "w.safetensors", **EXPORTED, modules={"output": "net.1"})
    want = to_torch(run.params, flattened={"output": 3})
    found = read_arrays(path)
    assert sorted(found) == ["net.1.bias", "net.1.weight"]
    np.testing.assert_array_equal(found["net.1.weight"], want["output.weight"])
    jax.tree.map(np.testing.assert_array_equal, started(str(path), initial_rename="output=net.1"), run.params)
    for rename, says in {
        None: "names in the file = 'net.1.bias, net.1.weight': must be those of the model .* initial_rename=LAYER=NAME",
        "output=net.2": "shape of net.1.bias in the file = .*: must be none, as the model has it",
        "fc9=net.1": "initial_rename = 'fc9': must be one of the layers: output",
    }.items():
        with pytest.raises(ValueError, match=rf"^initial = '.*w\.safetensors': {says}"):
            started(str(path), initial_rename=rename)
    for initial in (None, run.params):
        with pytest.raises(ValueError, match=r"^initial_rename = 'output=a': must be left out with"):
            started(initial, initial_rename="output=a")


def test_runs_of_a_sweep_start_from_weights_of_their_own(trained, tmp_path):
    run, folder = trained
    other = write_arrays(tmp_path / "zeros.npz", {k: 0 * v for k, v in read_arrays(folder / "params.npz").items()})
    points = expand(SERVED, {"initial": [str(folder), str(other)]})
    for point, factor in zip(points, (1, 0), strict=True):
        params = prepare(point.settings).params
        jax.tree.map(lambda found, want, by=factor: np.testing.assert_array_equal(found, by * want), params, run.params)


def test_nodes_start_from_weights_too_and_their_mean_or_one_of_them_is_written(trained, tmp_path):
    run, folder = trained
    nodes = {**SMALL, "method": "async_dfedavg", "delay": "exponential", "updates": 6, "test_fraction": 0.2}
    jax.tree.map(np.testing.assert_array_equal, prepare(Settings(**nodes, initial=str(folder))).params, run.params)
    each = run._replace(
        params=jax.tree.map(lambda leaf: np.stack([leaf, leaf + 2]), run.params),
        schedule=prepare(Settings(**nodes)).schedule,
    )
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
    with pytest.raises(
        ValueError, match=r"^flattened = None: must be \{layer: channels\}, since the model is your own"
    ):
        export(tmp_path / "run", tmp_path / "w.npz", names="torch")
    export(tmp_path / "run", tmp_path / "w.npz", names="torch", flattened={})


def test_what_cannot_be_used_is_named(trained, tmp_path):
    run, _ = trained
    path = export(run, tmp_path / "w.npz")
    for error, options in {
        r"^to = '.*w\.npz': must be a new file": {},
        r"^names = 'pytorch': ": {"names": "pytorch"},
        r"^modules = \{'output': '0'\}: must be left out without names = torch": {
            "modules": {"output": "0"},
            "overwrite": True,
        },
        r"^best = True: must be left out": {"best": True, "overwrite": True},
        r"^node = 1: must be left out: the run has a server": {"node": 1, "overwrite": True},
    }.items():
        with pytest.raises(ValueError, match=error):
            export(run, path, **options)
    with pytest.raises(ValueError, match=r"^initial = '.*w\.npz': shape of fc1/bias in the file = 'none': must be \("):
        started(str(path), model="mlp:hidden=8")
    with pytest.raises(ValueError, match=r"^initial = .*: must be a text, or a pytree of arrays"):
        started({"fc1": 3})
    with pytest.raises(ValueError, match=r"^initial = 'missing\.npz': must be a file of weights \(.npz, .*folder"):
        started("missing.npz")
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
    assert cli.main(["export", str(folder), "--to", str(to)]) == 2
    assert "error: to = " in capsys.readouterr().err
    for names, rename, says in (
        ("torch", "output", "rename = 'output': must be LAYER=NAME"),
        ("torch", "output=1,output=2", "rename = 'output=1,output=2': must be LAYER=NAME, each layer once"),
        ("torch", "fc9=1", "rename = 'fc9': must be one of the layers: output"),
        ("own", "fc9=1", "rename = 'fc9=1': must be left out without --names torch"),
    ):
        flags = ["--to", str(to), "--overwrite", "--names", names, "--rename", rename]
        assert cli.main(["export", str(folder), *flags]) == 2
        assert f"error: {says}" in capsys.readouterr().err
