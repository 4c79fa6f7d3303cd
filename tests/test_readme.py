"""The README's commands parse, its examples run, the names in it exist, and its table is the recorded one."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fedjax_async import cli
from fedjax_async.cli import flags, listing, sweep_file
from fedjax_async.peers.methods import METHODS
from tests import forked

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "experiments").rglob("README.md"))]
TEXT = PAGES[0].read_text(encoding="utf-8")
HELP = (flags.EPILOG, sweep_file.SWEEP_EPILOG)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def commands(text: str) -> list[str]:
    """Every `fedjax-async ...` of a page or of the command line's own help, in code blocks and in running text."""
    blocks = re.findall(r"^(?:.*&& |\s*)(fedjax-async .+)$", text, re.MULTILINE)
    return sorted({*blocks, *re.findall(r"`(fedjax-async [^`]+)`", text)})


ALL = sorted({command for text in (*(page.read_text() for page in PAGES), *HELP) for command in commands(text)})


def test_the_main_commands_are_there():
    assert "pip install '.[plot]' && fedjax-async quickstart\n" in TEXT
    assert "pip install '.[data,dev]' && python -m pytest\n" in TEXT
    assert len(ALL) > 8
    screen = "\n".join(TEXT.splitlines()[:50])
    assert "fedjax-async run" in screen and "```python" in screen and "accuracy.png" in screen, "on the first screen"


@pytest.mark.parametrize("command", ALL)
def test_a_command_parses(command):
    numbered = re.sub(r"\$\w+|\bN\b", "0", command)  # a shell variable, or N, is the number of a job
    program, *arguments = shlex.split(numbered, comments=True)
    assert program in PROJECT["scripts"]
    assert callable(cli.parser().parse_args(arguments).action)


def test_extras_exist():
    named = {extra for extras in re.findall(r"pip install '\.\[([\w,]+)\]'", TEXT) for extra in extras.split(",")}
    assert named and named <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    links = {page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)}
    rooms = {ROOT / path for path in re.findall(r"`((?:fedjax_async|experiments|notebooks|tests)/[\w./]*)`", text)}
    assert sorted(str(path) for path in links | rooms if not path.exists()) == []


def test_names_exist():
    """Every name in the overview is in the registry of its kind."""
    kinds = "methods|server parts|topologies|timings|delays|partitions|data sets|compressors|models"
    rows = dict(re.findall(rf"^\| ({kinds}) \| (.+) \|$", TEXT, re.MULTILINE))
    assert len(rows) == 9
    for kind, row in rows.items():
        assert set(re.findall(r"`(\w+)`", row)) <= set(
            listing.entries({"server parts": "parts"}.get(kind, kind.replace(" ", "")))
        ), kind
    peers = re.search(r"^\| methods without a server \| (.+) \|$", TEXT, re.MULTILINE)
    assert peers is not None and set(re.findall(r"`(\w+)`", peers[1])) == set(METHODS)


def test_the_table_is_the_recorded_one():
    assert (ROOT / "experiments" / "quickstart" / "comparison.md").read_text(encoding="utf-8") in TEXT


def rows_of(text: str, header: str) -> list[dict[str, str]]:
    """The rows of the Markdown table that begins with ``header``: column -> cell."""
    lines = text[text.index(f"| {header} |") :].split("\n\n", 1)[0].splitlines()
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_the_speeds_are_those_of_the_benchmarks():
    page = (ROOT / "experiments" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    measured = [row | {"engine / torch": row["/ torch"]} for row in rows_of(page, "model | clients | delays")]
    shown = rows_of(TEXT, "model | clients | delays")
    assert len(shown) > 8
    for row in shown:
        assert any(row.items() <= found.items() for found in measured if found["method"] == "fedasync"), row


def test_no_folder_is_named_for_two_runs():
    """A reader who runs all commands in order never gets the error that a folder holds another run."""
    notebooks = "\n".join(
        "".join(cell["source"])
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    )
    named: dict[str, set[str]] = {}
    for text in (TEXT, flags.EPILOG, notebooks):
        for command in commands(text):
            words = shlex.split(command, comments=True)
            if "--out" in words and words[1] in ("run", "compare"):
                named.setdefault(words[words.index("--out") + 1], set()).add(command)
        for line in re.findall(r".*(?:out=|save\(run, )\"[^\"]+\".*", text):
            named.setdefault(line.split('"')[1], set()).add(line)
    assert {folder: found for folder, found in named.items() if len(found) > 1} == {}


@pytest.mark.usefixtures("commands_compile_as_here")  # they compile for longer than they run
@pytest.mark.parametrize("number", range(TEXT.count("```python")))
def test_an_example_runs(number, tmp_path):
    (tmp_path / "example.py").write_text(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[number])
    done = forked.python([str(tmp_path / "example.py")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
