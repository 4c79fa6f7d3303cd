"""The tables of the book, from the registries, the settings, the contracts and their docstrings.

``python notebooks/generate.py`` writes ``methods.md``, ``names.md``, ``settings.md`` and ``signatures.md``; a test
compares them with the code.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedjax_async import types
from fedjax_async.base import factories
from fedjax_async.base.method import Method, factory_of
from fedjax_async.cli import listing
from fedjax_async.config import concerns, registries
from fedjax_async.config.methods import method_options
from fedjax_async.local import local_training

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
NOTE = "<!-- Written by notebooks/generate.py from the code. Do not change it by hand. -->"
# Kind -> its title, and where its names are used.
KINDS = {
    "methods": ("Methods", "`--method NAME`, in Python `method=`; in `compare` without a flag"),
    "parts": ("Server parts", "after a `+` of a method with a server: `fedbuff+swa:start=0.5`"),
    "timings": ("Timings", "after an `@` of a method, or `--timing`"),
    "policies": ("Policies", "`--policy`, joined with `+`"),
    "topologies": ("Topologies", "`--topology`, of methods without a server"),
    "exchanges": ("Exchanges", "after an `@` of a method without a server, or `--exchange`"),
    "delays": (
        "Delays",
        "`--delay`. `mean` and `std` are virtual seconds of a job. Distributions (`constant` to `pareto`) make all "
        "clients equally fast unless `heterogeneity` is positive: each then has a factor of mean 1 on its times, drawn "
        "once from the family `speeds`; `heterogeneity=1` spreads nine of ten lognormal factors from a fifth to five "
        "times their median. `reference_steps`: the times are those of jobs of so many local steps; `bandwidth`: bytes "
        "a second, which add the time of the messages",
    ),
    "availability": ("Availability", "`--availability`, joined with `+`"),
    "faults": ("Faults", "`--faults`, joined with `+`"),
    "networks": ("Networks", "`--network`"),
    "energy": ("Energy", "`--energy`"),
    "partitions": ("Partitions", "`--partition`"),
    "datasets": ("Data sets", "`--dataset`"),
    "augmentations": ("Training images", "`--augment`, joined with `+`"),
    "attacks": ("Attacks", "`--attack`"),
    "privacy": ("Privacy", "`--privacy`, joined with `+`"),
    "models": ("Models", "`--model`"),
    "clients": ("Clients", "`--client`, for those that you register; a method of the package brings its own"),
    "optimizers": ("Optimisers", "`--optimizer`"),
    "decays": ("Decays of the learning rate", "`--decay`"),
    "compressors": ("Compressors", "`--compress`"),
    "metrics": ("Metrics", "`--metrics`, joined with `,`"),
    "staleness": ("Weights by staleness", "the option `staleness` of rules that weigh by staleness"),
    "sampling": ("Sampling of clients", "the option `sampling` of timings"),
}
# Use of settings -> what the table calls it.
USES = {
    "server": "methods with a server",
    "nodes": "methods without a server",
    "reference": "the reference engine",
    "sweep": "single runs of a sweep",
    "trajectory": "`config.trajectory`",
    "explain": "`explain`",
    "own_client": "a client of your own",
    "dealt": "data that are already divided",
    "adaptive": "runs with a policy",
}
CITATION = re.compile(r"((?:de )?[A-Z][\w-]+(?:(?:, [A-Z]\w+)* et al\.|(?:, | and )[A-Z]\w+[\w, ]*|))[ ,](\d{4})")
CONTRACTS = (
    "ServerAlgorithm", "ClientAlgorithm", "PeerAlgorithm", "Model", "FederatedData", "ClientData", "Message", "Request",
    "Arrival", "Info", "Facts", "Event", "Schedule", "Probe", "Evaluation", "Run",
)  # fmt: skip


def cell(text: object) -> str:
    """Text of a table's cell: one line, code in single backticks, all else without a meaning in Markdown."""
    plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(str(text).split())).replace("``", "`")
    return re.sub(r"(`[^`]*`)|([*_<[\]])", lambda found: found[1] or f"\\{found[2]}", plain).replace("|", r"\|")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(title: str, opening: str, *parts: str) -> str:
    """A page of the book."""
    return "\n\n".join([NOTE, f"# {title}", opening, *parts]) + "\n"


def plain(part: Any) -> Any:
    """The function behind a factory: without its partial arguments and its groups of options."""
    made = factory_of(part)
    while hasattr(made, "func"):
        made = made.func
    return inspect.unwrap(made)


def source(part: Any) -> str:
    """A link to the file of a factory."""
    file = Path(inspect.getsourcefile(plain(part)) or "").resolve().relative_to(ROOT).as_posix()
    return f"[`{file.removeprefix('fedjax_async/')}`](../{file})"


def about(entry: Any) -> str:
    """An entry of a registry in one line."""
    return str(getattr(entry, "about", "") or factories.summary(entry))


def options_of(entry: Any, name: str) -> dict[str, Any]:
    """Option -> default of an entry of a registry; ``...`` for an option that must be given."""
    if isinstance(entry, Method):
        return method_options(name)
    found = factories.options_of(entry).items()
    return {key: ... if option.default is option.empty else option.default for key, option in found}


def singular(kind: str) -> str:
    """What ``register`` and the settings call a kind of ``fedjax-async list``."""
    named = {id(registry): name for name, registry in registries.REGISTRIES.items()}
    module, dictionary = listing.REGISTRIES[kind]
    return named.get(id(getattr(importlib.import_module(f"fedjax_async.{module}"), dictionary)), kind)


# --- methods ----------------------------------------------------------------------------------
def citations(text: str) -> list[str]:
    """The papers that a text cites as "Author et al. 2022"."""
    return [f"{name} {year}" for name, year in CITATION.findall(text)]


def paper(name: str, methods: dict[str, Method]) -> str:
    """The paper of a method, as its line, its docstrings or the method whose variant it is cite it."""
    entry = methods[name]
    parts = [entry.rule] if plain(entry.client) is local_training else [entry.rule, entry.client]
    variant_of = methods.get(name.partition("_")[0], entry)
    texts = [entry.about, variant_of.about, *(inspect.getdoc(plain(part)) or "" for part in parts)]
    return next((found[0] for text in texts if (found := citations(text))), "")


def chapters() -> Iterator[tuple[str, str, str]]:
    """(path from ``notebooks/``, title, text) of every notebook, and of the page and scripts of every experiment."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(each["source"]) for each in cells)
        yield path.name, path.name[:2], text
    for path in sorted((ROOT / "experiments").glob("*/README.md")):
        folder = path.parent
        if folder.name not in ("benchmarks", "quickstart", "methods"):  # these have nearly all methods
            text = "\n".join(each.read_text(encoding="utf-8") for each in (path, *sorted(folder.glob("*.py"))))
            yield f"../{path.relative_to(ROOT).as_posix()}", folder.name, text


def methods_page() -> str:
    """Method, paper, file, notebooks."""
    texts = list(chapters())
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for name, entry in registries.METHODS.items():
        used = re.compile(rf"(?:[\"'`]|--method |compare [^\n`]*\b){name}(?![\w.])")
        shown = [f"[{title}]({path})" for path, title, text in texts if used.search(text)]
        files = [source(entry.rule)]
        files += [] if plain(entry.client) is local_training else [source(entry.client)]
        row = [f"`{name}`", cell(entry.about), paper(name, registries.METHODS), ", ".join(dict.fromkeys(files))]
        rows[entry.has_server].append([*row, " ".join(shown)])
    header = ["method", "what it does", "paper", "file", "shown in"]
    return page(
        "Methods",
        "After this page you know which methods there are, the paper of each, the file that has its formula, its\n"
        "source and its deviations from it, and where you see it at work: notebooks by number, experiments by name.",
        "`fedjax-async list methods NAME` prints all that is documented of a method. Its options are in\n"
        "[all names](names.md#methods); how to write another is in [own parts](own_parts.md). Of some methods neither\n"
        "the paper nor its authors' code could be read: [methods left out](left_out.md).",
        "## With a server",
        table(header, rows[True]),
        "## Without a server",
        table(header, rows[False]),
    )


# --- names ------------------------------------------------------------------------------------
def options(found: dict[str, Any]) -> str:
    """Options with their defaults; those that must be given have none."""
    shown = [key if value is ... else f"{key}={value}" for key, value in found.items()]
    return f"`{', '.join(shown)}`".replace("|", r"\|") if shown else ""


def names_page() -> str:
    """Every name with its options."""
    parts = []
    for kind, (title, use) in KINDS.items():
        entries = listing.entries(kind)
        rows = [[f"`{name}`", cell(about(entry)), options(options_of(entry, name))] for name, entry in entries.items()]
        parts.append(f"## {title}\n\n{use[0].upper()}{use[1:]}.")
        parts += [table(["name", "what it is", "options and their defaults"], rows)] if rows else []
    return page(
        "All names",
        "After this page you can choose every part of a run by name, with its options.",
        "`NAME:option=value,option=value` sets options; one without a default must be given. To see all that is\n"
        "documented of a name: `fedjax-async list methods orthofl`. To give a name to a part of your own:\n"
        "[own parts](own_parts.md).",
        *parts,
    )


# --- settings ---------------------------------------------------------------------------------
def settings_page() -> str:
    """Every setting, in groups."""
    parts = []
    for title, group in concerns.GROUPS.items():
        rows = []
        for field in dataclasses.fields(group):
            default = "" if field.default is None else f"`{field.default}`"
            without = ", ".join(USES[use] for use in field.metadata["without"])
            meaning = cell(field.metadata["about"])
            rows.append([f"`{field.name}`", default, meaning, field.metadata["role"], without])
        parts += [f"## {title[0].upper()}{title[1:]}\n\n{inspect.getdoc(group)}"]
        parts += [table(["setting", "default", "what it is", "role", "refused for"], rows)]
    return page(
        "All settings",
        "After this page you know every setting of a run: its default, its role in a sweep, and where it is\n"
        "refused because it would have no effect.",
        "They are arguments of `simulate`, `compare` and `sweep`, keys of a sweep's file, and flags of the command\n"
        "line with `-` for `_`: `eval_time` is `--eval-time`. A default in square brackets is derived. The role says\n"
        "what a sweep does with several values: it *chooses* the best of a `tuned` setting, *compares* those of a\n"
        "`compared` one, and keeps those of a `world` apart.",
        *parts,
    )


# --- signatures -------------------------------------------------------------------------------
def text_of(annotation: Any) -> str:
    """An annotation as it is written, without modules."""
    if isinstance(annotation, str):
        return annotation
    plain = isinstance(annotation, type) and not typing.get_args(annotation)
    return annotation.__name__ if plain else re.sub(r"\b(?:\w+\.)+", "", str(annotation))


def signature(entry: Any) -> str:
    """``f(positional, *, options) -> what it returns`` of a factory."""
    function = plain(entry.rule if isinstance(entry, Method) else entry)
    found = inspect.signature(function)
    taken = [p.name for p in found.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return f"f({', '.join([*taken, '*', 'options'])}) -> {text_of(found.return_annotation)}"


def dictionary_of(module: str, name: str) -> str:
    """A link to the file that assigns a registry."""
    folder = ROOT / "fedjax_async" / module.partition(".")[0]
    assigns = re.compile(rf"^{name}(?:: .*)? = ", re.MULTILINE)
    path = next(path for path in sorted(folder.glob("*.py")) if assigns.search(path.read_text(encoding="utf-8")))
    return f"`{name}` in [`{path.relative_to(folder.parent)}`](../{path.relative_to(ROOT).as_posix()})"


MOST_FIELDS = 10  # that the table of kinds shows


def outline(value: Any) -> str:
    """A contract with its fields; a function with the types that it takes and what it returns."""
    if isinstance(value, type) and hasattr(value, "_fields"):
        fields = value._fields if len(value._fields) <= MOST_FIELDS else ("...",)
        return f"{value.__name__}({', '.join(fields)})"
    taken, returned = typing.get_args(value) or ((), value)
    text = outline(returned) if hasattr(returned, "_fields") else text_of(returned)
    return f"({', '.join(map(text_of, taken))}) -> {text}" if taken else text


def meaning(entry: Any) -> str:
    """What the returned type of a factory is; empty if it says so itself."""
    function = plain(entry)
    value = function.__globals__.get(text_of(inspect.signature(function).return_annotation))
    shown = "" if value is None else outline(value)
    return "" if set(re.findall(r"\w+", shown)) <= {"Any"} else f"`{shown}`".replace("|", r"\|")


def kinds_rows() -> Iterator[list[str]]:
    """Kind, what its factories take and return, where they are listed, an example."""
    for kind, (module, dictionary) in listing.REGISTRIES.items():
        shown: dict[str, tuple[str, Any]] = {}
        for name, entry in listing.entries(kind).items():
            shown.setdefault(signature(entry), (name, entry))
        for form, (name, entry) in shown.items():
            rule = entry.rule if isinstance(entry, Method) else entry
            home = module if rule is entry else "server" if entry.has_server else "peers"
            found = [f"`{singular(kind)}`", f"`{form}`".replace("|", r"\|"), meaning(rule)]
            yield [*found, dictionary_of(home, dictionary), f"`{name}`, {source(rule)}"]


def fields_of(contract: Any) -> Iterator[list[str]]:
    """Field, type and comment of a contract, from its source text."""
    lines = inspect.getsource(contract).splitlines()
    for line in lines:
        found = re.fullmatch(r"    (\w+): (.+?)(?:\s{2}# (.*))?", line)
        if found and found[1] in contract.__annotations__:
            name, kind, comment = found.groups()
            yield [f"`{name}`", f"`{kind}`".replace("|", r"\|"), cell(comment or "")]


def signatures_page() -> str:
    """What each kind of part takes and returns, and the fields of the contracts."""
    parts = [
        "## Kinds of parts",
        table(["kind", "signature of the factory", "which is", "listed in", "example"], kinds_rows()),
    ]
    parts += [
        "## Contracts",
        "`fedjax_async/types.py`, also in the API reference, explains them; here are their fields.",
    ]
    for name in CONTRACTS:
        contract = getattr(types, name)
        summary = cell((inspect.getdoc(contract) or "").partition("\n")[0])
        parts += [f"### {name}", summary, table(["field", "type", "what it is"], fields_of(contract))]
    return page(
        "Signatures",
        "After this page you know what the factory of each kind of part takes and returns, and the fields of what it\n"
        "returns.",
        "A factory takes its options by keyword; a spec such as `lognormal:mean=60` sets them. The kinds are those of\n"
        "`register`. Letters in shapes: N clients, J jobs, E arrivals, K local steps, B batch, D parameters,\n"
        "M training examples, T test examples.",
        *parts,
    )


PAGES: dict[str, Callable[[], str]] = {
    "methods.md": methods_page,
    "names.md": names_page,
    "settings.md": settings_page,
    "signatures.md": signatures_page,
}


def main() -> None:
    """Write all pages."""
    for name, made in PAGES.items():
        (FOLDER / name).write_text(made(), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
