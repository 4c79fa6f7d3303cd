"""Every notebook runs from top to bottom, and its code gives the stored outputs."""

from __future__ import annotations

import re

import nbformat
import numpy as np
import pytest

from notebooks.execute import NOTEBOOKS, code_cells, executed, joined, numbers, read, words
from tests import forked

IDS = [path.stem for path in NOTEBOOKS]
ADVICE = "run: python notebooks/execute.py"
assert len(NOTEBOOKS) >= 8


# their programs are large and run only briefly
BRIEF = ("05", "07", "08", "09")


@pytest.mark.book
@pytest.mark.filterwarnings("default")  # warnings of the notebook packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_the_stored_outputs_are_those_of_the_code(path, request, monkeypatch):
    monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", forked.Kernel)
    if path.stem.startswith(BRIEF):
        request.getfixturevalue("commands_compile_as_here")
    for kept, new in zip(code_cells(read(path)), code_cells(executed(path)), strict=True):
        assert words(kept) == words(new), f"{kept.id} of {path.name} says something else now; {ADVICE}"
        (whole, decimal), (new_whole, new_decimal) = numbers(kept), numbers(new)
        assert whole == new_whole, f"{kept.id} of {path.name} has other numbers now; {ADVICE}"
        np.testing.assert_allclose(new_decimal, decimal, rtol=0.1, err_msg=f"{kept.id} of {path.name}; {ADVICE}")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_outputs_are_stored_without_traces_of_a_machine(path):
    notebook = read(path)
    code = code_cells(notebook)
    assert [cell.id for cell in notebook.cells] == [f"cell-{k:02d}" for k in range(len(notebook.cells))]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), ADVICE
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs), "a picture"
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, "no warnings, no progress bars"
    text = nbformat.writes(notebook)
    assert not re.findall(r"0x[0-9a-f]{8,}|site-packages|\.venv", text)
    assert '"execution":' not in text, "no times"
    assert len(text) < 500_000, "small enough to be shown on the web"


def test_printed_lines_are_one_output_however_slowly_they_come():
    texts = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("a\n", "b\n", "c\n")]
    picture = nbformat.v4.new_output("display_data", data={"image/svg+xml": "<svg/>"})
    found = joined([*texts[:2], picture, texts[2]])
    assert [output.get("text") for output in found] == ["a\nb\n", None, "c\n"]


def printed(text, **metadata):
    outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    return nbformat.v4.new_code_cell(outputs=outputs, metadata=metadata)


def test_words_see_what_changed_and_not_by_how_much():
    assert words(printed("mean 1.25  ----\n-3e-05 nan")) == words(printed("mean 17,000\n--------- inf 2"))
    assert words(printed("mean 1.25")) != words(printed("median 1.25"))
    assert words(printed("mean 1.25")) != words(printed("mean 1.25 2"))
    drawn = printed("")
    drawn.outputs.append(nbformat.v4.new_output("display_data", data={"image/svg+xml": "<svg/>"}))
    assert words(drawn) != words(printed(""))


def test_numbers_are_whole_or_not_and_left_out_where_rounding_decides():
    assert numbers(printed("12,000 bytes of 3, -4 and 1.5 or -3e-05")) == ([12000, 3, -4], [1.5, -3e-05])
    assert numbers(printed("12", tags=["rounding"])) == ([], [])
