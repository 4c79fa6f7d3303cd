"""Write the model of a run to a file of weights, with our names or PyTorch's; ``initial`` reads such files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from fedjax_async.base import check
from fedjax_async.config.own import ABSENT, Named
from fedjax_async.config.problem import data_of, flattened_of
from fedjax_async.config.settings import from_dict
from fedjax_async.models import arrays_of, to_torch, write_arrays
from fedjax_async.models.weights import check_target
from fedjax_async.results.store import load
from fedjax_async.types import Params, Run

NAMES = ("own", "torch")


def export(
    run: Run | str | Path,
    to: str | Path,
    *,
    names: str = "own",
    modules: Mapping[str, str] | None = None,
    flattened: Mapping[str, int] | None = None,
    best: bool = False,
    node: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the last model of a run (or the best one) to an ``.npz`` or ``.safetensors`` file; returns its path.

    A run with a server does not keep the clients' own models: leaves that stay with their clients (the setting
    ``personal``) are written with their initial values. Without a server, a node's model has its own leaves.

    Args:
      run: a run, or the folder of a saved one.
      to: the file; its ending is ``.npz`` or ``.safetensors``.
      names: ``own``, as ``conv1/kernel``, or ``torch``: the names and layouts of a PyTorch module with the same layers
        (:func:`fedjax_async.models.to_torch`).
      modules: with ``torch``, the names of the layers in the module, if they differ, ``{"conv1": "features.0"}``.
      flattened: with ``torch``, ``{layer: channels}`` of dense layers behind a flattened feature map. By default they
        are found from the run's settings, which needs its data set; give them for a model of nnx, and for one of your
        own that is not registered. The params of a PyTorch module have its layouts already.
      best: the best model, of a run with ``keep_best``.
      node: of a run without a server, the model of this node; the mean of all nodes' models by default.
      overwrite: replace an existing file.

    Another run can start from the file (the setting ``initial``). Raises: ``ValueError`` naming the wrong argument.
    """
    check.one_of("names", names, NAMES)
    path = check_target(check.path("to", to))
    check.require(overwrite or not path.exists(), "to", str(path), "a new file, but it exists (overwrite replaces it)")
    for field, given in (("modules", modules), ("flattened", flattened)):
        check.require(names == "torch" or given is None, field, given, "left out without names = torch")
    found = run if isinstance(run, Run) else load(check.path("run", run))
    params = _model_of(found, best=best, node=node)
    if names == "own":
        return write_arrays(path, arrays_of(params))
    if flattened is None and any(name.split("/")[-1] == "kernel" for name in arrays_of(params)):
        settings = from_dict(found.settings)
        if isinstance(settings.model, Named) and settings.model.thing is ABSENT:
            allowed = "{layer: channels}, since the model is your own, or load the plugin that registers it"
            raise ValueError(f"flattened = None: must be {allowed}")
        flattened = flattened_of(settings, data_of(settings))
    return write_arrays(path, to_torch(params, flattened=flattened, modules=modules), torch=True)


def _model_of(run: Run, *, best: bool, node: int | None) -> Params:
    """The chosen model, on the host."""
    if best and run.best is None:
        raise ValueError("best = True: must be left out, the run kept no best model (keep_best)")
    params = jax.tree.map(np.asarray, run.best.params if best and run.best is not None else run.params)
    if run.has_server:
        check.require(node is None, "node", node, "left out: the run has a server, and one model")
        return params
    if node is None:
        return jax.tree.map(lambda leaf: leaf.mean(axis=0, dtype=np.float64).astype(leaf.dtype), params)
    check.whole("node", node, 0, run.schedule.num_clients - 1)
    return jax.tree.map(lambda leaf: leaf[node], params)
