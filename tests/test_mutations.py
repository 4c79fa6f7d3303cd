"""The mutation check itself: each kind of fault on a small text, the choice, and the tests that cover a file."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.mutation_operators import EXCLUDED, FOLDERS, KINDS, ROOT, choose, faults_in, mutated, sources
from tests.mutations import covering, make_copy, put

# kind -> source text -> the texts with one fault
CASES = {
    "sign": {"a + b": ["a - b"], "(a - b) * c": ["(a - b) / c", "(a + b) * c"], "-a": ["a"], "-1": [], "x + 'y'": []},
    "bound": {"a < b": ["a <= b"], "x[1:-1]": ["x[2:-1]", "x[1:-2]"], "range(n)": ["range(n - 1)"]},
    "arguments": {"f(a, b, c)": ["f(b, a, c)"], "f(a, 1)": [], "max(a, b)": []},
    "mask": {"jnp.where(m, a, b)": ["a"], "a & b": ["a"], "x * mask": ["x"], "x / jnp.where(y > 0, y, 1)": []},
    "condition": {"a if b else c": ["a if not b else c"], "a and b": ["a or b"], "a == b": ["a != b"]},
    "key": {"fold_in(key, 1)": ["key"], "jax.random.split(key)": ["([key] * 2)"]},
    "close": {"file.close()": ["pass"], "x = rule.close(a, b)": ["x = (a, b)"]},
    "element": {"x[0]": ["x[1]"], "x[-1]": ["x[0]"], "def f():\n    return a, b": ["def f():\n    return b, a"]},
}
CASES["bound"]["rng.random() < p"] = []
CASES["key"]["default_rng([seed, i])"] = ["default_rng([seed])"]
CASES["close"]["ServerAlgorithm(init, close)"] = ["ServerAlgorithm(init, None)"]
WITHOUT_RESULT = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    SIZE = 1 + 2
@cached(1 + 1)
def f(x: Shape[0] = None) -> Shape[1]:
    '''1 + 1'''
    if x < 0:
        raise ValueError(f"{x + 1}")
    check.share("x", 1 - x)
    assert x == 1
"""


@cache
def all_faults():
    return [fault for path in sources() for fault in faults_in((ROOT / path).read_text(encoding="utf-8"), path)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_fault_makes_these_texts(kind):
    for source, wanted in CASES[kind].items():
        found = [mutated(source, fault) for fault in faults_in(source, "") if fault.kind == kind]
        assert found == wanted


def test_a_fault_changes_its_bytes_alone_and_nothing_where_no_result_is_decided():
    assert faults_in(WITHOUT_RESULT, "") == []
    source = "a = 'é'; b = (c +  # é\n     d)  # comment\n"
    (fault,) = faults_in(source, "")
    assert mutated(source, fault) == "a = 'é'; b = (c - d)  # comment\n"


def test_a_fault_of_the_package_is_another_program():
    for fault in all_faults()[::30]:  # to parse all of them takes a minute
        source = (ROOT / fault.path).read_text(encoding="utf-8")
        assert mutated(source, fault) != source and ast.parse(mutated(source, fault)), fault


def test_the_choice_is_a_function_of_the_seed_over_all_folders_and_kinds():
    faults = all_faults()
    chosen = choose(faults, 0, 60)
    assert chosen == choose(list(faults), 0, 60) and chosen != choose(faults, 1, 60)
    assert len(set(chosen)) == 60
    folders = [fault.path.split("/")[1] for fault in chosen]
    assert {folders.count(folder) for folder in FOLDERS} == {10}
    assert {fault.kind for fault in chosen} == set(KINDS)
    again = choose([fault for fault in faults if fault != chosen[0]], 0, 60)
    assert len(set(again) & set(chosen)) > 55, "a fault less leaves most others chosen"


def test_every_source_file_has_tests_and_what_is_excluded_exists():
    for path in sources():
        assert covering(path), path
    for name, reason in EXCLUDED.items():
        path, function, before = [*name.split(":", 2), "", ""][:3]
        source = (ROOT / path).read_text(encoding="utf-8")
        assert reason and f"def {function.split('.')[-1]}" in source and before in source, name


def test_a_copy_has_the_fault_only_as_long_as_it_is_judged(tmp_path):
    fault = all_faults()[0]
    folder = make_copy(tmp_path)
    source = (ROOT / fault.path).read_text(encoding="utf-8")
    with put(fault, folder):
        assert (folder / fault.path).read_text(encoding="utf-8") == mutated(source, fault)
        assert (ROOT / fault.path).read_text(encoding="utf-8") == source
    assert (folder / fault.path).read_text(encoding="utf-8") == source
