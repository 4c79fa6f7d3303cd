"""What the site adds to the pages of ``notebooks/``: contents, copies of the experiments' pages, the API reference.

All that it writes is in ``notebooks/_built``, which git ignores.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
from pathlib import Path
from typing import Any

from fedjax_async.base import lazy
from notebooks import docstrings

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
BUILT = FOLDER / "_built"
EXPERIMENTS = ROOT / "experiments"
LINK = re.compile(r"(\[[^][]*\]\(|\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
PACKAGES = ("", "clock", "data", "models", "compress", "geometry", "local", "server", "peers", "engine", "config")
PACKAGES += ("theory", "results", "bridges", "types")

# A wide formula scrolls by itself; on a wide window the text leaves room for lines of code.
STYLE = """\
mjx-container[display="true"] { overflow-x: auto; overflow-y: hidden; }
@media (min-width: 92em) { .content { width: 54em; } }
@media (min-width: 110em) { .content { width: 62em; } .sidebar-drawer { width: calc(50% - 34em); } }
"""


# --- links ------------------------------------------------------------------------------------
def place_of(path: Path) -> Path:
    """Where a file of the repository is on the site: pages of experiments are copies, folders are their README."""
    page = path / "README.md" if (path / "README.md").is_file() else path
    if page.is_relative_to(EXPERIMENTS) and page.suffix == ".md":
        return BUILT / page.relative_to(ROOT)
    return FOLDER / "README.md" if page == ROOT / "README.md" else page


def moved(text: str, page: Path, to: Path) -> str:
    """The text of ``page`` with links that hold where it stands as ``to``."""

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if not target.exists():
            return found[0]
        if place_of(target).is_dir():  # a folder without a page
            return found[1].strip("[](")
        return found[1] + Path(os.path.relpath(place_of(target), to.parent)).as_posix() + (found[3] or "") + found[4]

    return LINK.sub(link, text)


def write_copies() -> None:
    """Copies of the pages of the experiments."""
    for page in sorted(EXPERIMENTS.rglob("*.md")):
        to = place_of(page)
        to.parent.mkdir(parents=True, exist_ok=True)
        text = moved(page.read_text(encoding="utf-8"), page, to)
        to.write_text(f"---\norphan: true\n---\n\n{text}", encoding="utf-8")  # some are not in the contents


# --- contents ---------------------------------------------------------------------------------
def contents(text: str) -> str:
    """The page of contents with a toctree for each of its parts, and one for the API reference."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    trees = [
        (title, re.findall(r"^- \[[^]]*\]\(([^)]+)\)", body, re.MULTILINE))
        for title, body in zip(parts[::2], parts[1::2])
    ]
    trees.append(("Reference", [f"_built/api/{file_of(package)}" for package in PACKAGES]))
    for title, links in trees:
        names = "\n".join(re.sub(r"\.(md|ipynb|rst)$", "", link) for link in links)
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{names}\n```\n"
    return text


def read(app: Any, name: str, source: list[str]) -> None:
    """Change the links of a page of the book, and add the toctrees to the contents."""
    if not name.startswith("_built/"):
        page = Path(app.env.doc2path(name))
        source[0] = moved(source[0], page, page)
        if name == "README":
            source[0] = contents(source[0])


# --- the API reference ------------------------------------------------------------------------
def file_of(package: str) -> str:
    """The name of a package's page."""
    return f"fedjax_async.{package}".rstrip(".") + ".rst"


def rank(name: str, thing: Any) -> tuple[int, str]:
    """Functions first, then classes, then values; each in the order of the alphabet."""
    return (1 if inspect.isclass(thing) else 0 if callable(thing) else 2, name.lower())


def public(package: str) -> list[tuple[str, Any]]:
    """The public names of a package with what they are; of ``types``, the contracts that it defines."""
    module = importlib.import_module(f"fedjax_async.{package}".rstrip("."))
    own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
    names = own if package == "types" else lazy.names(module.__name__)
    found = [(name, getattr(module, name)) for name in names if not name.startswith("_")]
    return sorted([each for each in found if not inspect.ismodule(each[1])], key=lambda each: rank(*each))


def entry(where: str, name: str, thing: Any) -> list[str]:
    """The directive for a public name."""
    if inspect.isclass(thing):
        return [f".. autoclass:: {where}.{name}", "   :members:", ""]
    if inspect.isroutine(thing):
        return [f".. autofunction:: {where}.{name}", ""]
    kind = f"   One of {len(thing)} entries by name, a dict." if isinstance(thing, dict) else "   A value or a type."
    return [f".. py:data:: {name}", "", kind, ""]


def row(name: str, thing: Any, home: str) -> list[str]:
    """The row of a public name in the table at the top of a page: a link, and the first line of its docstring."""
    documented = inspect.isclass(thing) or inspect.isroutine(thing)
    about = (inspect.getdoc(thing) or "").partition("\n")[0] if documented else ""
    return [f"   * - :py:obj:`{name} <{home}>`", f"     - {docstrings.plain(about)}"]


def write_api() -> None:
    """A page for each package: its docstring, then every public name once, at the first package that has it."""
    homes: dict[int, str] = {}
    for package in PACKAGES:
        where = f"fedjax_async.{package}".rstrip(".")
        lines = [where, "=" * len(where), "", f".. automodule:: {where}", "   :no-members:", ""]
        lines += [".. list-table::", "   :widths: 25 75", ""]
        entries: list[str] = []
        for name, thing in public(package):
            here = f"{where}.{name}"
            home = homes.setdefault(id(thing), here) if callable(thing) else here
            lines += row(name, thing, home)
            entries += entry(where, name, thing) if home == here else []
        path = BUILT / "api" / file_of(package)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, "", *entries]), encoding="utf-8")


# --- connected to Sphinx ----------------------------------------------------------------------
def begin(app: Any) -> None:
    """Write what is not in the repository, before Sphinx looks for pages."""
    shutil.rmtree(BUILT, ignore_errors=True)
    write_copies()
    write_api()
    app.add_css_file("book.css")
    (BUILT / "static").mkdir()
    (BUILT / "static" / "book.css").write_text(STYLE, encoding="utf-8")
    app.config.html_static_path = ["_built/static"]


def end(app: Any, failed: Exception | None) -> None:
    """The contents are the front page."""
    if failed is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    begin(app)
    app.connect("source-read", read)
    app.connect("build-finished", end)
