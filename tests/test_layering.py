"""The structure of the repository: allowed imports, length of files, forbidden content; lint, format and types."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fedjax_async"
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(path for folder in ("experiments", "tests") for path in (ROOT / folder).rglob("*.py"))
FILES = [*MODULES, *SCRIPTS]

BASE = {"base", "types"}
MATHS = BASE | {"geometry", "compress", "models", "data", "clock"}
METHODS = MATHS | {"local"}
ENGINE = METHODS | {"server", "peers", "engine"}
CONFIG = ENGINE | {"config"}
# subpackage or module -> what it may import besides itself
ALLOWED = {
    "__version__": set(),  # of the package itself
    "base": BASE,  # with types, which no file of it imports that types needs: there are no circles
    "types": BASE,
    "geometry": BASE,
    "compress": BASE,
    "models": BASE,
    "data": BASE,
    "clock": BASE,
    "local": MATHS,
    "server": METHODS,
    "peers": METHODS,
    "engine": ENGINE,
    "config": ENGINE,
    "theory": CONFIG,
    "results": CONFIG,
    "bridges": CONFIG | {"results"},
    "cli": CONFIG | {"bridges", "theory", "results", "__version__"},
    "__main__": {"cli"},
}
# types that mean the same wherever they are defined: local variables of a job, the state of a node, two sizes, ...
SAME_MEANING = {"Action", "Block", "Dense", "Inbox", "Node", "Norm", "Padding", "Pair", "Stays", "Work"}
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff"}
TOP_LEVEL |= {"fedjax_async", "experiments", "notebooks", "tests"}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


def imports(path: Path) -> Iterator[str]:
    """Full dotted names of everything that a file imports, lazily or not."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def roots(path: Path) -> set[str]:
    """The packages that a file imports."""
    return {name.split(".")[0] for name in imports(path)}


def imports_point_one_way(path):
    """The imports that do not; the public names of the package may come from any part but the command line."""
    here = room(path)
    allowed = ALLOWED.keys() - {"cli"} if path == PACKAGE / "__init__.py" else ALLOWED[here] | {here}
    ours = [name for name in imports(path) if name.split(".")[0] == "fedjax_async"]
    return [name for name in ours if [*name.split("."), ""][1] not in allowed]


def circle(left):
    """What is left of a graph without the names that need nothing else of it."""
    while free := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found for name, found in left.items() if name not in free}
    return sorted(left)


def test_neither_the_directions_nor_the_modules_have_a_circle():
    """Also where only type checkers import, or a function does; packages are left out, which import all they have."""
    assert not circle({name: allowed - {name} - BASE for name, allowed in ALLOWED.items()})
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    left = {}
    for name, path in known.items():
        # a name that is imported, or the module that it is taken from
        found = {each for full in imports(path) for each in (full, full.rpartition(".")[0])} & known.keys() - {name}
        left[name] = {each for each in found if known[each].name != "__init__.py"}
    assert not circle(left)


# what plans nodes, in ``peers``
PLANNING = ("checking", "ergodicity", "exchange_parts", "exchanges", "inboxes", "kept_mean", "planning", "pushes",
            "receivers", "schedule", "segments", "statistics", "swift", "synchronous", "timelines", "topologies",
            "trace", "waves")  # fmt: skip


def test_the_clock_knows_no_jax():
    nodes_of = [PACKAGE / "peers" / f"{name}.py" for name in PLANNING]
    below = [PACKAGE / "base" / f"{name}.py" for name in ("check", "registry", "disk")]
    for path in [*(PACKAGE / "clock").rglob("*.py"), *nodes_of, *below]:
        assert not {"jax", "jaxlib", "flax", "optax"} & roots(path), path
        assert not [name for name in imports(path) if name.startswith("fedjax_async.base.tree")], path


def test_only_extras_pay_for_extras():
    """matplotlib, TFDS and the like are imported inside functions; pyplot and test libraries never, flax by models."""
    optional = {"matplotlib", "tensorflow_datasets", "PIL", "torch", "array_record", "pyarrow", "h5py", "submitit"}
    optional |= {"plotly"} | {"tensorboard", "wandb", "ray", "flwr", "safetensors"}
    never = {"jaxtyping", "beartype", "pytest", "hypothesis", "tensorflow"}
    assert {room(path) for path in MODULES if "flax" in roots(path)} <= {"models"}
    for path in MODULES:
        assert not never & roots(path), path
        assert not [name for name in imports(path) if name.startswith("matplotlib.pyplot")], path
        for node in nodes(path)[0].body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                first = [(node.module or "")] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not optional & {name.split(".")[0] for name in first}, path


def test_a_public_name_hides_no_module_but_its_own():
    """A public name that equals a module's name comes from that module; another one would hide the module."""
    for path in MODULES:
        if path.name == "__init__.py":
            package = ".".join(path.parent.relative_to(ROOT).parts)
            modules = {module.stem for module in path.parent.glob("*.py")}
            for name in imports(path):
                where, _, public = name.rpartition(".")
                assert public not in modules or where in (package, f"{package}.{public}"), f"{name} hides a module"


def test_a_type_has_one_meaning():
    """No two modules define a public class or alias (in CamelCase) of the same name, except ``SAME_MEANING``."""
    defined: dict[str, list[str]] = {}
    for path in MODULES:
        for node in nodes(path)[0].body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            found = {getattr(target, "name", getattr(target, "id", "")) for target in targets}
            for name in found:
                if name[:1].isupper() and not name.isupper():
                    defined.setdefault(name, []).append(str(path))
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1 and name not in SAME_MEANING}


def test_files_are_short_and_every_module_says_what_it_is_for():
    assert {str(path): lines for path in MODULES if (lines := len(path.read_text().splitlines())) > 400} == {}
    assert [str(path) for path in MODULES if not ast.get_docstring(nodes(path)[0])] == []


def listed() -> list[Path]:
    """Files that git tracks or would add; without git (in an unpacked archive), every file."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\0")
    paths = [ROOT / name for name in found if name] or list(ROOT.rglob("*"))
    return [path for path in paths if path.is_file()]


def test_the_top_level_holds_only_what_it_should_and_no_file_names_a_place_on_somebodys_machine():
    entries = {path.relative_to(ROOT).parts[0] for path in listed()}
    extra = {name for name in entries - TOP_LEVEL if not name.startswith(".") and not name.endswith(".egg-info")}
    assert PACKAGE.name in entries and not extra
    places = [f"/{name}/" for name in ("work", "tmp", "root", "home")]
    for path in listed():
        if path.suffix in {".py", ".md", ".toml", ".ipynb", ".csv", ""}:
            text = path.read_text(encoding="utf-8")
            assert not [place for place in places if place in text], path


def nothing_unpickles_or_runs_text(path):
    yield from roots(path) & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for node in nodes(path):
        if isinstance(node, ast.Call):
            if getattr(node.func, "id", "") in {"eval", "exec", "compile", "breakpoint"}:
                yield f"line {node.lineno}: {node.func.id}"
            for keyword in node.keywords:
                if keyword.arg in {"shell", "allow_pickle"} and getattr(keyword.value, "value", True) is not False:
                    yield f"line {node.lineno}: {keyword.arg}"


def nothing_is_left_to_do(path):
    for node in nodes(path):
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield f"line {node.lineno}"
    if path != Path(__file__).resolve():
        yield from (word for word in ("TODO", "FIXME", "XXX") if word in path.read_text(encoding="utf-8"))


def the_package_validates_with_errors_not_assert(path):
    return [node.lineno for node in nodes(path) if isinstance(node, ast.Assert)]


def no_test_skips_or_expects_failure(path):
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and node.attr in {"skip", "skipif", "xfail", "importorskip"}:
            yield node.lineno


@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        (nothing_unpickles_or_runs_text, FILES),
        (nothing_is_left_to_do, FILES),
        (imports_point_one_way, MODULES),
        (the_package_validates_with_errors_not_assert, MODULES),
        (no_test_skips_or_expects_failure, SCRIPTS),
    ],
)
def test_files_keep_the_rule(rule, paths):
    assert not {str(path): wrong for path in paths if (wrong := list(rule(path)))}


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", pytest.param("mypy", marks=pytest.mark.book)])
def test_lint_format_and_types_are_clean(command, pytestconfig):
    """mypy keeps what it has found in pytest's own cache, so only the first time takes long."""
    given = [sys.executable, "-m", *command.split()]
    if command == "mypy" and hasattr(pytestconfig, "cache"):
        given += ["--cache-dir", str(pytestconfig.cache.mkdir("mypy"))]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
