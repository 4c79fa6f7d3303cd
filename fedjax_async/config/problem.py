"""The data and the model of a run: a data set divided among clients, and a model on its raw rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, inputs, registry, tree
from fedjax_async.base.spec import Spec
from fedjax_async.config import concerns, objects, own
from fedjax_async.config.contracts import checked_partition, returned
from fedjax_async.config.of_data import USUAL_PARTITION
from fedjax_async.config.own import Chosen
from fedjax_async.config.protection import with_attackers
from fedjax_async.config.settings import DEFAULTS, Settings, given_in
from fedjax_async.data import DATASETS, Dataset, Federation, augmentation, check_data, federate
from fedjax_async.data.augment import check_augment
from fedjax_async.data.checking import layout, remedy
from fedjax_async.data.decode import as_is
from fedjax_async.data.federated import check_dataset, dealt, with_validation
from fedjax_async.data.looks import warn_of_looks
from fedjax_async.data.normalise import normalised
from fedjax_async.engine.compiling import jitted
from fedjax_async.engine.components import row_of
from fedjax_async.models import MODELS, OF_TEXT, augmented, decoded, from_module, in_dtype, is_module, rematerialised
from fedjax_async.models.state_dicts import flattened, from_torch, has_torch_names, layer_names
from fedjax_async.models.torch_modules import from_torch_module, is_torch_instance
from fedjax_async.models.weights import READERS, arrays_of, filled, read_arrays
from fedjax_async.types import Array, FederatedData, Key, Model, Params


class ReadData(NamedTuple):
    """A data set that a spec names, or that the setting holds, and the files that were read for it, in this order."""

    data: Any  # Dataset, Federation, or FederatedData
    files: list[Path]


@registry.cached_by_name(maxsize=64)  # as many as _data: runs share programs if they have the same arrays
def read_data(dataset: Chosen) -> ReadData:
    """Read a data set, and check it."""
    with inputs.collected() as files:
        given = own.thing_of("dataset", dataset)
        if given is None:
            given = registry.spec("dataset", DATASETS, str(dataset)).make()
        kinds = (Dataset, Federation, FederatedData)
        if not isinstance(given, kinds):
            check.require(False, "dataset", objects.shown(given), f"a name or {objects.KINDS['dataset']}")
        if isinstance(given, Federation):  # what it deals is checked
            return ReadData(given, files)
        given = check_dataset(given) if isinstance(given, Dataset) else check_data(given)
    return ReadData(given._replace(decode=own.lasting_part("dataset", dataset, given.decode)), files)


def brings_client_tests(s: Settings) -> bool:
    """Whether the data set already has test parts of clients: its own clients, or natural owners that are kept."""
    dataset = read_data(s.dataset).data
    if not isinstance(dataset, Dataset):
        return True
    return dataset.test_groups is not None and str(s.partition or "natural") == "natural"


@registry.cached_by_name(maxsize=64)
def _with_fewer_tests(dataset: Chosen, count: int) -> Dataset:
    """The data set with ``count`` of its test examples, spread evenly over their order."""
    whole = read_data(dataset).data
    allowed = f"left out: {dataset} is already divided among clients"
    check.require(isinstance(whole, Dataset), "eval_examples", count, allowed)
    check.whole("eval_examples", count, high=len(whole.test_y))
    chosen = np.linspace(0, len(whole.test_y), count, endpoint=False).astype(np.int64)
    fields = ("test_x", "test_y", *(("test_groups",) if whole.test_groups is not None else ()))
    return whole._replace(**{field: getattr(whole, field)[chosen] for field in fields})


@registry.cached_by_name(maxsize=64)
def _data(dataset: Chosen, tests: int | None, partition: Chosen | None, *options: Any) -> FederatedData:
    whole = read_data(dataset).data if tests is None else _with_fewer_tests(dataset, tests)
    if isinstance(whole, FederatedData):
        _, seed, _, validation_fraction = options
        return with_validation(whole, validation_fraction, np.random.default_rng((seed, 1)))
    is_own = isinstance(partition, own.Named)
    partitioner = checked_partition(own.thing_of("partition", partition)) if is_own else cast(str, partition)
    with check.called({"num_clients": "clients", "partitioner": "partition"}):
        if isinstance(whole, Dataset):
            return dealt(whole, partitioner, *options)
        return check_data(federate(whole, partitioner, *options))


@registry.cached_by_name(maxsize=64)
def _inputs(normalise: str | None, *dealt: Any) -> FederatedData:
    """The data of :func:`_data`, with standardised inputs."""
    data = _data(*dealt)
    data = data if normalise is None else normalised(data, normalise)
    warn_of_looks(data)
    return data


@registry.cached_by_name(maxsize=64)
def _attacked(attack: str, seed: int, *inputs: Any) -> FederatedData:
    """The data of :func:`_inputs`, with clients that attack."""
    return with_attackers(_inputs(*inputs), attack, seed)


def data_of(s: Settings) -> FederatedData:
    """The clients' data: a data set divided by the settings' partition and seed, or data that are already divided.

    Equal settings give the same object, so that runs share the copy on the device. Raises ``ValueError`` if the data
    are already divided and the settings ask for another division; a validation part may be held out of both.
    """
    if isinstance(read_data(s.dataset).data, FederatedData):
        concerns.refuse("dealt", given_in(s))
    options = (s.partition, s.clients, s.seed, s.test_fraction, s.validation_fraction)
    inputs = (s.normalise, s.dataset, s.eval_examples, *options)
    return _inputs(*inputs) if s.attack is None else _attacked(s.attack, s.seed, *inputs)


def usual_partition(settings: Settings) -> dict[str, Any]:
    """The setting ``partition``, ``natural`` if the data set has clients of its own, and the number of such clients."""
    dataset = read_data(settings.dataset).data
    natural = not isinstance(dataset, Dataset) or dataset.groups is not None
    partition = settings.partition or ("natural" if natural else USUAL_PARTITION)
    if not isinstance(dataset, FederatedData):
        return {"partition": partition}
    allowed = "left out: the clients' data are given, already divided"
    check.require(str(partition) == "natural", "partition", str(partition), allowed)
    if settings.clients != DEFAULTS["clients"]:
        check_count(settings.clients, dataset)
    return {"partition": "natural", "clients": len(dataset.size)}


def check_count(clients: object, data: FederatedData) -> None:
    """``ValueError`` unless ``clients`` is the number of clients in the data."""
    count = len(data.size)
    check.require(clients == count, "clients", clients, f"left out, or {count}: the data have {count} clients")


# --- the model ------------------------------------------------------------------------------------


def model_of(s: Settings, data: FederatedData) -> Model:
    """The model of the settings, a name or an object, on the raw rows of ``data``."""
    shape = input_shape(data)
    try:
        chosen = _model(s.model, shape, data.num_classes)
    except ValueError as error:
        of_inputs = "input_shape = " in str(error) or str(error).startswith("module = ")
        more = remedy(data.y) if data.num_classes is None else layout(shape) if of_inputs else ""
        raise ValueError(f"{error}{more}") from error
    augment = None if s.augment is None else _augment(s.augment)
    if augment is not None:
        tried = partial(returned, "augment", objects.KINDS["augment"], augment)
        check_augment(tried, row_of(data.x), s.augment)
    if own.thing_of("model", s.model) is None and registry.read("model", str(s.model)).name in OF_TEXT:
        _check_codes(registry.spec("model", MODELS, str(s.model)), data)
    return _ready(chosen, data.decode, s.compute, s.remat, augment)


def _check_codes(model: Spec, data: FederatedData) -> None:
    """``ValueError`` for inputs of a model of texts that are no codes, or codes that it has no vector for.

    It would read them as nothing at all.
    """
    if data.decode is not as_is:
        return
    found = np.dtype(data.x.dtype)
    check.require(
        np.issubdtype(found, np.integer), "inputs", found.name, f"codes, whole numbers: {model.name} reads texts"
    )
    most = model.options["vocabulary"]
    for name, x in (("x", data.x), ("test_x", data.test_x)):
        if isinstance(x, np.ndarray) and not (name == "x" and data.streamed):
            low, high = int(x.min()), int(x.max())
            check.require(low >= 0, f"smallest code in {name} of {data.name}", low, "at least 0")
            allowed = f"at least {high + 1}: codes in {name} of {data.name} reach {high}"
            check.require(high < most, f"vocabulary of {model.name}", most, allowed)


def _augment(spec: Chosen) -> Callable[[Key, Array], Array]:
    """The augmentation that a spec names, or the object that the setting holds."""
    given = own.thing_of("augment", spec)
    return augmentation(str(spec)) if given is None else own.lasting(given)


@registry.cached_by_name(maxsize=16)
def _model(spec: Chosen, shape: tuple[int, ...], num_classes: int | None) -> Model:
    """The model that a spec names, or the object that the setting holds; a module becomes a classifier."""
    given = own.thing_of("model", spec)
    if given is None:
        try:
            named = registry.spec("model", MODELS, str(spec), input_shape=shape, num_classes=num_classes)
            given = named.make()
            torch = not isinstance(given, Model) and is_torch_instance(given)
            if torch and num_classes is not None and named.make() is not given:
                given = from_torch_module(named.make)  # made under the seed of the run, as the class itself would be
        except ValueError as error:
            labels = "the targets of the data set are numbers, not classes (classes are integer labels, not one-hot)"
            check.require(not str(error).startswith("num_classes = None"), "model", spec, f"such as linear: {labels}")
            if str(error).startswith("input_shape = "):
                raise ValueError(
                    f"model = {spec!r}: does not fit the data; {error} (linear, logistic and mlp take any)"
                ) from None
            raise
    if not isinstance(given, Model) and is_module(given):
        allowed = (
            "a Model of models.from_flax(net, input_shape=..., loss=...): the targets y are numbers, not classes "
            "(classes are integer labels, not one-hot or floats)"
        )
        check.require(num_classes is not None, "model", f"a {type(given).__name__}", allowed)
        return from_module(given, input_shape=shape)
    if not isinstance(given, Model):
        check.require(False, "model", objects.shown(given), "a name, a Model, or a module of flax or torch.nn")
    for name in ("init", "apply", "loss"):
        if not callable(function := getattr(given, name)):
            check.require(False, f"model.{name}", objects.shown(function), "a function, see Model")
    model: Model = own.lasting_part("model", spec, given)
    return model


@lru_cache(maxsize=64)
def _ready(
    model: Model,
    decode: Callable[[Array], Array],
    compute: str,
    remat: bool,
    augment: Callable[[Key, Array], Array] | None,
) -> Model:
    """The model on raw rows, with arithmetic in ``compute``; it trains on augmented rows if there is an ``augment``."""
    ready = decoded(model if compute == "float32" else in_dtype(model, jnp.dtype(compute)), decode)
    ready = rematerialised(ready) if remat else ready
    return ready if augment is None else augmented(ready, augment)


def input_shape(data: FederatedData) -> tuple[int, ...]:
    """Shape of one decoded example."""
    found: tuple[int, ...] = tree.shapes(data.decode, row_of(data.x)).shape[1:]
    return found


def check_model(model: Model, params: Params, data: FederatedData) -> None:
    """``ValueError`` unless the model has one output per class, and ``private`` selects some but not all leaves."""
    if model.private is not None:
        paths = [tree.path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        kept = [path for path in paths if model.private(path)]
        check.require(
            0 < len(kept) < len(paths), "model.private", f"{len(kept)} of {len(paths)} leaves", "some of them"
        )
    outputs = tree.shapes(model.apply, params, row_of(data.x))
    if data.num_classes is not None:
        classes, positions = outputs.shape[-1], outputs.shape[1:-1]
        wanted = tuple(data.y.shape[1:])
        advice = "; several yes-or-no labels an example are targets: pass y.astype(float), and a model with their loss"
        advice = advice if len(wanted) == 1 and data.num_classes == 2 else ""
        allowed = f"{data.num_classes}, one per class of {data.name}{advice}"
        check.require(classes == data.num_classes, "model outputs", classes, allowed)
        labels = f"labels of shape {['B', *wanted]}"
        allowed = f"{['B', *wanted, classes]}, since {data.name} has {labels}".replace("'", "") + advice
        check.require(positions == wanted, "shape of model outputs", ["B", *positions, classes], allowed)


def params_dtype(compute: str) -> str:
    """The dtype of the parameters, whatever the local steps compute in."""
    return "float64" if compute == "float64" else "float32"


@lru_cache(maxsize=64)
def initial(init: Callable[[Key], Params], dtype: str) -> Any:
    """Jitted ``root -> (params, key of the run)``, for all models that start by this ``init``."""

    def make(root: Key) -> tuple[Params, Key]:
        init_key, run_key = jax.random.split(root)
        params = init(init_key)
        if dtype == "float64":
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        return params, run_key

    return jitted(make, once=True)


PARAMS = "params.npz"  # in the folder of a run: its final parameters


def initial_file(initial: str) -> Path:
    """The file that the setting ``initial`` names: a file of weights, or the parameters in the folder of a run."""
    path = check.path("initial", initial)
    return path / PARAMS if path.is_dir() else path


def start_of(s: Settings, model: Model, data: FederatedData) -> tuple[Params, Key]:
    """The parameters that a run starts from, and its key: the model's own, or those that the setting ``initial`` names.

    A file may have the names of the run's parameters, or PyTorch's (``models.state_dicts``); ``initial_rename`` gives
    the layers that have another name there. Raises ``ValueError`` naming the file and the array that does not fit.
    """
    params, key = initial(model.init, params_dtype(s.compute))(jax.random.key(s.seed))
    if s.initial is None:
        return params, key
    renamed = layer_names("initial_rename", s.initial_rename)
    given = own.thing_of("initial", s.initial)
    if given is not None:
        allowed = "left out with an object as initial, which has the model's own names"
        check.require(renamed is None, "initial_rename", s.initial_rename, allowed)
        return _finite(filled(params, arrays_of(given), "initial")), key
    allowed = f"a file of weights ({', '.join(READERS)}) or the folder of a run, but there is none"
    check.require(check.path("initial", str(s.initial)).exists(), "initial", s.initial, allowed)
    try:
        return _finite(_read_start(s, params, data, renamed)), key
    except ValueError as error:
        raise ValueError(f"initial = {s.initial!r}: {error}") from error


def _finite(params: Params) -> Params:
    """The params; ``ValueError`` for one that is not finite, as in a run that diverged: it would never train."""
    for name, leaf in arrays_of(params).items():
        good = bool(np.isfinite(np.asarray(leaf)).all())
        check.require(good, f"initial, {name}", "NaN or infinite", "finite numbers")
    return params


def _read_start(s: Settings, params: Params, data: FederatedData, renamed: dict[str, str] | None) -> Params:
    """The parameters in the file that ``initial`` names, in the structure of ``params``."""
    arrays = read_arrays(initial_file(str(s.initial)))
    if renamed is not None or has_torch_names(arrays, params):
        options: dict[str, Any] = {"flattened": flattened_of(s, data), "modules": renamed, "source": "the file"}
        with check.called({"modules": "initial_rename"}):
            return from_torch(arrays, params, **options)
    names = sorted(arrays_of(params))
    allowed = (
        f"those of the model ({', '.join(names)}), or PyTorch's; layers with another name there are given by "
        "initial_rename=LAYER=NAME,..."
    )
    check.require(not arrays or bool({*arrays} & {*names}), "names in the file", ", ".join(sorted(arrays)), allowed)
    return filled(params, arrays, "the file")


def flattened_of(s: Settings, data: FederatedData) -> dict[str, int]:
    """Layer -> channels, for each dense layer that follows a flattened feature map."""
    shape = input_shape(data)
    return flattened(_model(s.model, shape, data.num_classes), shape)
