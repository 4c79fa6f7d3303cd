"""Names for factories of the user's own: ``register``, and the files, modules and packages that call it.

Registered names are kept in ``base.registry.ADDED``, apart from the registries of the package, which tests go through.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, TypeVar

from fedjax_async.base import check, factories, inputs, registry
from fedjax_async.base.fingerprints import fingerprint
from fedjax_async.base.method import Method, client_options, factory_of, positional
from fedjax_async.config.measures import require_column
from fedjax_async.config.method_checks import NODES, check_factory, check_fields
from fedjax_async.config.names import JOINED
from fedjax_async.config.objects import shown
from fedjax_async.config.registries import REGISTRIES, filled
from fedjax_async.types import ServerAlgorithm

AnyFactory = TypeVar("AnyFactory", bound=Callable[..., object])

ENTRY_POINTS = "fedjax_async.plugins"  # the group of entry points in installed packages
# Files and modules that were loaded, for processes that continue a run or a sweep -> the file's digest at that moment.
LOADED: dict[str, str] = {}
_calls: list[tuple[str, str]] = []  # every call of register, also repeated ones
_without_parts: set[str] = set()  # files and modules that were imported and registered nothing
GIVEN = {"optimizer": "lr", "client": "model"}  # kinds whose factories take a positional argument


def register(kind: str, name: str, *, replace: bool = False, **preset: Any) -> Callable[[AnyFactory], AnyFactory]:
    """Register a factory of your own under a name, to use like a built-in one: ``method="fair:limit=2"``.

    A decorator. The factory's keyword-only parameters are the options of the name. An option ``path`` is an input file
    or a folder of them: its content is part of the run. Annotate a number ``types.Traced``
    to let a sweep vary it within one compiled program.

    Args:
      kind: the setting: ``method`` (returns a ``ServerAlgorithm``, or ``f(stays, *, ...)`` a ``peers.PeerAlgorithm``),
        ``part`` (after the ``+`` of a method, a ``server.Part``), ``model`` (a ``Model``), ``dataset`` (a ``Dataset``
        or ``Federation``), ``client`` (``f(model, *, ...)``, a ``ClientAlgorithm``), ``optimizer`` (``f(lr, *, ...)``),
        ``delay``, ``timing``, ``policy`` (a ``clock.PolicyModel``), ``topology``, ``exchange``, ``availability``,
        ``faults``, ``network``, ``partition``, ``augment`` (``augment(key, x) -> x``), ``attack`` (a
        ``server.Attack``), ``privacy`` (a ``server.Privacy``), ``compress``, ``decay`` or ``metrics``
        (``f(outputs, y) -> [B]`` or a ``Metric``).
      name: lower-case letters, digits and ``_``.
      replace: allow other code under a registered name, as a notebook needs; otherwise that is an error.
      preset: for a method: ``timing`` (default ``"every"``), ``proximal``, ``compress``, ``feedback``, ``client``,
        ``plain_sgd``, ``optimizer`` and ``lr``, as in ``Method``; without a server ``exchange`` and ``topology``
        instead of ``timing`` and ``feedback``.

    Raises: ``ValueError`` for a name of the package, for a name registered with other code, and for a factory that has
    no fingerprint.

    >>> from fedjax_async import server, simulate
    >>> @register("method", "patient", timing="buffer:size=2")
    ... def patient(*, server_lr: float = 0.5):
    ...     "Two clients a step."
    ...     return server.fedbuff(server_lr=server_lr)
    >>> simulate(method="patient:server_lr=1", model="logistic", clients=4, updates=4).settings["method"]
    'patient:server_lr=1'
    """
    builtin = registry.find("kind", REGISTRIES, kind)
    plain = kind in (*JOINED, "part")
    pattern = r"[a-z][a-z_]*" if plain else r"[a-z][a-z0-9_]*"
    fits = isinstance(name, str) and re.fullmatch(pattern, name) is not None
    allowed = "lower-case letters and _" if plain else "lower-case letters, digits and _"
    check.require(fits, f"name of a {kind}", name, allowed)
    check.require(name not in builtin, f"name of a {kind}", name, "another name: the package has this one")
    check.require(kind == "method" or not preset, "preset", sorted(preset), "left out unless a method is registered")
    for option in preset:
        registry.find("preset", dict.fromkeys(_PRESET), option)
    if kind == "method":
        _check_preset(preset)
    if kind == "metrics":
        require_column(name)

    def decorate(factory: AnyFactory) -> AnyFactory:
        _check_signature(kind, name, factory)
        entry: Any = factory
        if kind == "method":
            entry = _method_entry(name, factory, preset)
        same = entry._replace(about="") if kind == "method" else entry  # a docstring does not count
        _add(kind, name, registry.Addition(entry, fingerprint(same)), replace)
        return factory

    return decorate


_PRESET = [field for field in Method._fields if field not in ("rule", "about")]


def _check_preset(preset: Mapping[str, Any]) -> None:
    """``ValueError`` for a value of a method's preset that is out of range, before its factory is known."""
    nodes = {"exchange", "topology"} & preset.keys()
    given = filled(Method(_of_nodes if nodes else ServerAlgorithm, **preset))
    check_fields(given, "preset")
    check_factory("preset.client", factory_of(given.client), client_options(given.client))


def _of_nodes(stays: object) -> object:
    """A factory of nodes, to check what is given beside one."""
    return stays


def _method_entry(name: str, factory: Callable[..., object], preset: Mapping[str, Any]) -> Method:
    """The method of a factory: without a server if the factory takes ``stays``, else with one."""
    nodes = positional(factory)
    kind = f"without a server ({name} takes stays)" if nodes else f"with a server ({name} does not take stays)"
    for field in ("timing", "policy", "feedback") if nodes else ("exchange", "topology"):
        check.require(field not in preset, f"preset.{field}", preset.get(field), f"left out of a method {kind}")
    takes = len(nodes) == len(NODES)
    allowed = "a compressor such as 'topk:ratio=0.1', which the factory takes" if takes else "left out: it takes none"
    fits = not nodes or takes == (preset.get("compress") is not None)
    check.require(fits, "preset.compress", preset.get("compress"), allowed)
    return filled(Method(factory, about=factories.summary(factory), **preset))


def _check_signature(kind: str, name: str, factory: object) -> None:
    what = f"{kind} {name}"
    rest = " (the rule alone; its timing, client, ... are given to register)" if isinstance(factory, Method) else ""
    wrap = f"def {name}({GIVEN.get(kind, '')}): return ...{rest}"
    allowed = f"a factory, a function of keyword-only options; wrap it: {wrap}"
    check.require(callable(factory), what, shown(factory) if isinstance(factory, tuple) else factory, allowed)
    wanted = [GIVEN[kind]] if kind in GIVEN else []
    given = positional(factory)
    nodes = kind == "method" and given in ([*NODES[:1]], [*NODES])
    example = f"def {name}({', '.join([*wanted, '*', 'option=1'])})"
    if kind == "method":
        example += f", or without a server def {name}({', '.join([NODES[0], '*', 'option=1'])})"
    fits = nodes or len(given) == len(wanted)
    check.require(fits, what, given, f"a factory of keyword-only options, as in {example}")


def _add(kind: str, name: str, addition: registry.Addition, replace: bool) -> None:
    _calls.append((kind, name))
    known = registry.ADDED.setdefault(kind, {})
    if name in known and known[name].fingerprint != addition.fingerprint:
        allowed = "registered once, but it was with other code (replace=True puts the new code in its place)"
        check.require(replace, f"name of a {kind}", name, allowed)
        registry.forget()
    if name not in known or known[name].fingerprint != addition.fingerprint:
        known[name] = addition


# --- plugins ----------------------------------------------------------------------------------------


def load_plugin(source: str) -> None:
    """Run a plugin: a file ``PATH.py``, or a module by its dotted name; it calls :func:`register`.

    Raises: ``ValueError`` naming the plugin if it cannot be found, raises an error, or registers nothing.
    """
    path = check.path("plugin", source)
    loaded, registered = set(sys.modules), len(_calls)
    try:
        if path.suffix == ".py":
            _run_file(path)
        else:
            importlib.import_module(source)
    except FileNotFoundError:
        raise ValueError(f"plugin = {source!r}: must be a Python file or a module; there is no such file") from None
    except ModuleNotFoundError as error:
        raise ValueError(
            f"plugin = {source!r}: must be a Python file or module that can be imported; {error}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"plugin = {source!r}: must run without an error; {type(error).__name__}: {error}") from error
    plugin = _full(path) if path.suffix == ".py" else source
    new = bool(set(sys.modules) - loaded)  # it was imported now
    if new:
        (_without_parts.discard if len(_calls) > registered else _without_parts.add)(plugin)
    allowed = "a Python file or module that registers parts (fedjax_async.register), but it registers nothing"
    check.require(plugin not in _without_parts, "plugin", source, allowed)
    if new or plugin not in LOADED:
        LOADED[plugin] = _digest(plugin)


def _run_file(path: Path) -> None:
    """Import a file, once, under a name of its own; it may import modules from its folder."""
    content = path.read_bytes()
    name = f"{path.stem}_{hashlib.sha256(_full(path).encode() + content).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsItIsNow(name, str(path)))
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, _full(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(_full(path.parent))


class _AsItIsNow(SourceFileLoader):
    """Keeps no compiled file, which Python takes for that of every later text of the same second and length."""

    def path_stats(self, path: str) -> dict[str, int]:
        """Without a time nothing compiled is read or written."""
        raise OSError(path)


def _full(path: Path) -> str:
    return str(path.resolve())


def load_installed() -> None:
    """Load the plugins that installed packages offer as entry points of the group ``fedjax_async.plugins``.

    An entry point is a module, or a function that is called; ``ValueError`` naming the one that fails.
    """
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = point.load()
            if inspect.isfunction(loaded):
                loaded()
        except (Exception, SystemExit) as error:
            raise ValueError(f"plugin = {point.value!r}: must run without an error; {error}") from error


def _digest(plugin: str) -> str:
    """The digest of a plugin's file; empty for a module without one."""
    file = plugin if plugin.endswith(".py") else getattr(sys.modules.get(plugin), "__file__", None) or ""
    return inputs.digest(file) if Path(file).is_file() else ""


def digests() -> dict[str, str]:
    """Name of a file, or a module's -> digest of each plugin as it was loaded; its file may have changed since."""
    found: dict[str, str] = {}
    for plugin, digest in LOADED.items():
        name = Path(plugin).name if plugin.endswith(".py") else plugin
        if digest:  # two files may have one name
            found[name] = f"{found[name]}+{digest}" if name in found else digest
    return found


def load(sources: Iterable[str]) -> None:
    """Load the plugins of installed packages, then these files and modules."""
    load_installed()
    for source in sources:
        load_plugin(source)
