"""README and the book: commands parse, examples run, links and anchors exist, tables are those of code and results."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fedjax_async import cli
from fedjax_async.base import registry
from fedjax_async.cli import flags, sweep_file
from notebooks import gallery, generate
from tests import forked

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BOOK = [README, *sorted((ROOT / "notebooks").glob("*.md"))]
PAGES = [*BOOK, *sorted((ROOT / "experiments").rglob("README.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
HELP = (flags.EPILOG, sweep_file.SWEEP_EPILOG)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROOMS = [path.name for path in (ROOT / "fedjax_async").iterdir() if path.is_dir() and path.name != "__pycache__"]
COOKBOOK, GALLERY = "notebooks/cookbook.md", "notebooks/gallery.md"
EXAMPLES = [name for name in TEXTS if ROOT / name in BOOK and "```python" in TEXTS[name]]
# Runs files of Python one after the other, and the commands in other files.
PROGRAM = """
import runpy, shlex, sys
from pathlib import Path
from fedjax_async.cli import main
for name in sys.argv[1:]:
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    for line in [] if name.endswith(".py") else Path(name).read_text().splitlines():
        if code := main(shlex.split(line, comments=True)[1:]):
            sys.exit(f"exit code {code}: {line}")
"""


def commands(text: str) -> list[str]:
    """Every `fedjax-async ...` of a page or of the command line's own help, in code blocks and in running text."""
    blocks = re.findall(r"^(?:.*&& |\s*)(fedjax-async .+)$", text, re.MULTILINE)
    return sorted({*blocks, *re.findall(r"`(fedjax-async [^`]+)`", text)})


ALL = sorted({command for text in (*TEXTS.values(), *HELP) for command in commands(text)})


def test_the_readme_is_one_screen():
    text = TEXTS["README.md"]
    assert text.count("\n") <= 110 and len(text.split()) <= 1000
    assert "pip install '.[plot]' && fedjax-async quickstart\n" in text
    assert "pip install '.[data,dev]' && python -m pytest\n" in text
    screen = "\n".join(text.splitlines()[:50])
    assert "fedjax-async run" in screen and "```python" in screen and "simulators.svg" in screen, "on the first screen"
    extras = re.findall(r"pip install '\.\[([\w,]+)\]'", "\n".join(TEXTS.values()))
    named = {extra for each in extras for extra in each.split(",")}
    assert named and named <= set(PROJECT["optional-dependencies"])


def test_every_page_says_what_it_is_for_and_is_in_the_contents():
    contents = TEXTS["notebooks/README.md"]
    for page in sorted((ROOT / "notebooks").glob("*.*")):
        if page.suffix in (".md", ".ipynb") and page.name != "README.md":
            assert f"]({page.name})" in contents, page.name
    for name, text in TEXTS.items():
        if name.startswith("notebooks/"):
            assert re.search(r"^# .+\n\nAfter this page you ", text, re.MULTILINE), name


@pytest.mark.parametrize("command", ALL)
def test_a_command_parses(command):
    numbered = re.sub(r"\$\w+|\bN\b", "0", command)  # a shell variable, or N, is the number of a job
    program, *arguments = shlex.split(numbered, comments=True)
    assert program in PROJECT["scripts"]
    assert callable(cli.parser().parse_args(arguments).action)


def anchors(text: str) -> set[str]:
    """What headings are called in links: as GitHub and the site do."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_paths_and_anchors_exist(name):
    text, page = TEXTS[name], ROOT / name
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if ":" not in link]
    paths = {page.parent / link.partition("#")[0] if link[0] != "#" else page for link in links}
    paths |= {ROOT / path for path in re.findall(r"`((?:fedjax_async|experiments|notebooks|tests)/[\w./]*)`", text)}
    modules = re.findall(rf"`((?:{'|'.join(ROOMS)})/\w+\.py)`", text)
    paths |= {ROOT / "fedjax_async" / path for path in modules}
    assert sorted(str(path) for path in paths if not path.exists()) == []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("name", generate.PAGES)
def test_the_tables_of_the_book_are_those_of_the_code(name, monkeypatch):
    monkeypatch.setattr(registry, "ADDED", {})  # doctests of the same process register names
    assert TEXTS[f"notebooks/{name}"] == generate.PAGES[name](), "run: python notebooks/generate.py"
    without = [name for name in generate.registries.METHODS if not generate.paper(name, generate.registries.METHODS)]
    assert without == ["asgd", "async_dfedavg", "independent"], "every method with a paper names it"


def rows_of(text: str, header: str) -> list[dict[str, str]]:
    """The rows of the Markdown table that begins with ``header``: column -> cell."""
    lines = text[text.index(f"| {header} |") :].split("\n\n", 1)[0].splitlines()
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_tables_are_the_recorded_ones_and_the_speeds_in_short_those_of_the_whole_table():
    recorded = (ROOT / "experiments" / "quickstart" / "comparison.md").read_text(encoding="utf-8")
    assert recorded in TEXTS["notebooks/first_result.md"]
    page = TEXTS["experiments/benchmarks/README.md"]
    measured = [row | {"engine / torch": row["/ torch"]} for row in rows_of(page, "model | clients | delays | method")]
    shown = rows_of(page, "model | clients | delays")
    assert len(shown) > 8
    for row in shown:
        assert any(row.items() <= found.items() for found in measured if found["method"] == "fedasync"), row


def test_the_table_of_other_simulators_is_the_recorded_one():
    shown = rows_of(TEXTS["experiments/benchmarks/README.md"], "program | asynchronous | clients trained at a time")
    with (ROOT / "experiments" / "benchmarks" / "results" / "simulators.csv").open(encoding="utf-8") as file:
        recorded = list(csv.DictReader(file))
    found = {}
    for row in recorded:
        name = row["program"] + (f", {row['method']}" if row["method"] else "")
        same = {column: row[column] for column in ("asynchronous", "clients trained at a time")}
        found[name] = found.get(name, same) | {row["model"]: f"{int(row['best (1/s)']):,}"}
    assert len(shown) == len(found) + 1
    for row in shown:
        name = row.pop("program").replace("`", "")
        assert row == found.get(name, row | dict.fromkeys(("logistic", "MLP-64", "LeNet-5"), "-")), name


def test_no_folder_is_named_for_two_runs():
    """A reader who runs all commands in order never gets the error that a folder holds another run."""
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    notebooks = "\n".join("".join(cell["source"]) for notebook in stored for cell in notebook["cells"])
    named: dict[str, set[str]] = {}
    for text in (*(TEXTS[page.relative_to(ROOT).as_posix()] for page in BOOK), flags.EPILOG, notebooks):
        for command in commands(text):
            words = shlex.split(command, comments=True)
            if "--out" in words and words[1] in ("run", "compare"):
                named.setdefault(words[words.index("--out") + 1], set()).add(command)
        for line, folder in re.findall(r"(.*(?:out=|save\(run, )\"([^\"]+)\".*)", text):
            named.setdefault(folder, set()).add(line)
    assert {folder: found for folder, found in named.items() if len(found) > 1} == {}


@pytest.mark.usefixtures("commands_compile_as_here")  # they compile for longer than they run
@pytest.mark.parametrize(
    "name", [name if name == "README.md" else pytest.param(name, marks=pytest.mark.book) for name in EXAMPLES]
)
def test_the_examples_of_a_page_run(name, tmp_path):
    """In one process, so that equal programs compile once. Blocks are on their own, except in the gallery.

    Blocks that import torch run where it is installed.
    """
    kinds = "python|sh" if name == COOKBOOK else "python"
    blocks = re.findall(rf"^```({kinds})\n(.*?)^```", TEXTS[name], re.DOTALL | re.MULTILINE)
    blocks = [("python", gallery.script())] if name == GALLERY else blocks
    if importlib.util.find_spec("torch") is None:
        blocks = [(kind, block) for kind, block in blocks if "import torch\n" not in block]
    files = [f"block_{number}.{'py' if kind == 'python' else kind}" for number, (kind, _) in enumerate(blocks)]
    for file, (_, block) in zip(files, blocks, strict=True):
        (tmp_path / file).write_text(block, encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = forked.python([str(tmp_path / "program.py"), *files], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
