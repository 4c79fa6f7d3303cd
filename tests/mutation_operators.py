"""The faults of the mutation check: which there can be in a source text, and which of them are chosen.

A fault is another text for one expression or statement. ``KINDS`` has a function for each kind of fault: from a node of
the syntax tree to its other texts. ``places`` says where no fault is put.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "server", "local", "clock", "compress", "peers")

# file, file:function or file:function:text before -> why a fault there changes no result
EXCLUDED = {
    "fedjax_async/engine/compiling.py": "XLA's options on a GPU: speed",
    "fedjax_async/engine/trajectory.py:kept_bytes": "an estimate of memory",
    "fedjax_async/engine/sending.py:write_messages:high - 1": "where a message is due, low is at most high - 1",
    "fedjax_async/engine/sending.py:write_together:high - 1": "as in ``write_messages``",
    "fedjax_async/local/optimizers.py:_shortened.update.shortened:norm < longest": "at the limit both are the gradient",
    "fedjax_async/local/curve.py:_alternate:over < 0": "at 0 both branches give the same gradient",
    "fedjax_async/peers/checking.py:_check_inboxes:bounds[0]": "no event comes before the first, so bounds[1] is 0 too",
    "fedjax_async/clock/pacing.py:plan_pace:paced.due <= now * SLACK": "equal to the last bit never happens",
    "fedjax_async/clock/checking.py:_check_columns:s.upload_time[s.job] <= s.time * SLACK": "as in ``plan_pace``",
    "fedjax_async/compress/codes.py:_ones:count - low": "bits beyond the data are zero, so more of them add no one",
    "fedjax_async/engine/peer_kernels.py:_probed:tables.chosen[name][position] & active": "values that nobody reads",
    "fedjax_async/engine/serving.py:Receiver.applied:len(tables.row) - 1": "beyond the table nothing is written either",
    "fedjax_async/peers/timelines.py:_with_conditions:columns[0]": "the columns grow together",
    "fedjax_async/peers/timelines.py:_walk.next_ones": "which nodes' jobs are drawn ahead: speed",
    "fedjax_async/peers/pushcen_adfl.py:pushcen.wake.mixed:jnp.where(heard, weight, 1)": "a guard, as in ``no_result``",
}


class Fault(NamedTuple):
    """One change of one file: ``before``, at bytes ``start`` to ``end``, becomes ``after``."""

    path: str  # relative to the checkout
    line: int
    kind: str
    function: str  # qualified name of the function around it; "" at the top of the module
    before: str
    after: str
    start: int
    end: int

    @property
    def name(self) -> tuple[str, ...]:
        """What the table shows, without the position in bytes."""
        return (self.path, str(self.line), self.kind, self.function, self.before, self.after)


Change = tuple[ast.AST, str]  # a node and its other text

# --- kinds of faults ----------------------------------------------------------------------------

OPPOSITE = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
# these mean the same with their first two arguments swapped
SYMMETRIC = {"add", "multiply", "maximum", "minimum", "max", "min", "logical_and", "logical_or", "logical_xor", "equal",
             "array_equal", "vdot", "hypot", "union1d", "intersect1d", "gcd", "lcm"}  # fmt: skip
MASKS = re.compile(r"mask|keep|kept|valid|known|accepted|applied|active|inside")


def called(node: ast.AST) -> str:
    """The last name of what a call calls; "" for other nodes."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def text(node: ast.expr) -> str:
    """Source text of an expression, in brackets unless it binds closely."""
    plain = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.Tuple, ast.List))
    return ast.unparse(node) if plain else f"({ast.unparse(node)})"


def whole(node: ast.AST | None) -> int | None:
    """The value of an integer literal, with its sign."""
    match node:
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) is int:
            return -value
        case ast.Constant(value) if type(value) is int:
            return value
    return None


def changed(node: Any, **fields: Any) -> str:
    """The text of a node with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return ast.unparse(other)


def sign(node: ast.AST) -> Iterator[Change]:
    """``a + b`` to ``a - b``, ``a * b`` to ``a / b``, and back; ``-a`` to ``a``. Joined texts and lists have none."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as operator, right):
            joins = (ast.List, ast.Tuple, ast.JoinedStr)
            if not any(isinstance(x, joins) or isinstance(getattr(x, "value", 0), str) for x in (left, right)):
                yield node, changed(node, op=OPPOSITE[type(operator)]())
        case ast.UnaryOp(ast.USub(), operand) if whole(node) is None:
            yield node, text(operand)


def bound(node: ast.AST) -> Iterator[Change]:
    """Off by one: ``<`` to ``<=`` and back, integers of slices, ends of ranges.

    Not where a random number is compared: it never equals its bound.
    """
    match node:
        case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() as operator]):
            if not re.search(r"random|uniform|chance", ast.unparse(node)):
                yield node, changed(node, ops=[OPPOSITE[type(operator)]()])
        case ast.Slice():
            for side in ("lower", "upper"):
                value = whole(getattr(node, side))
                if value is not None:
                    yield node, changed(node, **{side: ast.Constant(value + 1 if value >= 0 else value - 1)})
        case ast.Call(args=[end] | [_, end, *_]) if called(node) in ("range", "arange"):
            yield end, f"{text(end)} - 1"


def arguments(node: ast.AST) -> Iterator[Change]:
    """The first two arguments swapped, where both are names."""
    match node:
        case ast.Call(args=[ast.Name(a) as first, ast.Name(b) as second, *others]):
            if a != b and called(node) not in SYMMETRIC:
                yield node, changed(node, args=[second, first, *others])


def mask(node: ast.AST) -> Iterator[Change]:
    """A mask dropped: ``where(m, a, b)`` to ``a``, ``a & m`` to ``a``, ``a * mask`` to ``a``."""
    match node:
        case ast.Call(args=[_, kept, _]) if called(node) == "where":
            yield node, text(kept)
        case ast.BinOp(kept, ast.BitAnd()):
            yield node, text(kept)
        case ast.BinOp(left, ast.Mult(), right):
            for side, kept in ((left, right), (right, left)):
                if isinstance(side, (ast.Name, ast.Attribute)) and MASKS.search(ast.unparse(side)):
                    yield node, text(kept)


def condition(node: ast.AST) -> Iterator[Change]:
    """A condition negated; ``and`` to ``or``, ``==`` to ``!=``, and back."""
    match node:
        case ast.If(test) | ast.IfExp(test) | ast.While(test):
            yield test, f"not {text(test)}"
        case ast.comprehension(ifs=tests):
            yield from ((test, f"not {text(test)}") for test in tests)
        case ast.BoolOp(operator):
            yield node, changed(node, op=OPPOSITE[type(operator)]())
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() as operator]):
            yield node, changed(node, ops=[OPPOSITE[type(operator)]()])


def key(node: ast.AST) -> Iterator[Change]:
    """A wrong random key: the parent in place of its child, or a seed without its last number."""
    match node:
        case ast.Call(args=[parent, _]) if called(node) == "fold_in":
            yield node, text(parent)
        case ast.Call(ast.Attribute(ast.Attribute(attr="random"), "split"), args=[parent, *count]):
            yield node, f"([{ast.unparse(parent)}] * {text(count[0]) if count else 2})"
        case ast.Call(args=[ast.List(elts=[_, *_] as numbers)]) if called(node) == "default_rng":
            yield node, changed(node, args=[ast.List(numbers[:-1])])


def close(node: ast.AST) -> Iterator[Change]:
    """A forgotten ``close``: of a resource, or of a rule (its step never closes)."""
    match node:
        case ast.Expr(ast.Call(args=[]) as call) if called(call) == "close":
            yield node, "pass"
        case ast.Call(args=[state, memory]) if called(node) == "close":
            yield node, f"({ast.unparse(state)}, {ast.unparse(memory)})"
        case ast.Call(args=given) if called(node) == "ServerAlgorithm":
            yield from ((one, "None") for one in given if getattr(one, "id", "") in ("close", "closes"))


def element(node: ast.AST) -> Iterator[Change]:
    """The neighbour of an element: ``x[0]`` to ``x[1]``, and back; the two values of a ``return`` swapped."""
    match node:
        case ast.Subscript(value, index, ast.Load()) if whole(index) in (0, 1, -1):
            yield node, f"{text(value)}[{0 if whole(index) else 1}]"
        case ast.Return(ast.Tuple([first, second]) as pair):
            yield pair, f"{ast.unparse(second)}, {ast.unparse(first)}"


KINDS = {one.__name__: one for one in (sign, bound, arguments, mask, condition, key, close, element)}

# --- where --------------------------------------------------------------------------------------

NOT_CODE = {"annotation", "returns", "decorator_list"}  # fields of nodes


def no_result(node: ast.AST) -> bool:
    """Whether a node decides no result: a message and what decides to raise it, a check of arguments, a guard.

    A guard is ``where(y > 0, y, 1)`` before a division: another ``where`` drops the quotient that it guards.
    """
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            return True
        case ast.If(test, body):
            return all(map(no_result, body)) or "TYPE_CHECKING" in ast.unparse(test)
        case ast.Expr(call):
            return called(call) in ("warn", "refuse")
        case ast.Call(args=[test, ast.Name(name), ast.Constant(1)]) if called(node) == "where":
            return name in {getattr(part, "id", "") for part in ast.walk(test)}
        case ast.Call(function):
            return ast.unparse(function).startswith("check.")
    return False


def places(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """The nodes that may have a fault, with the function around each."""
    if no_result(node):
        for child in getattr(node, "orelse", []):
            yield from places(child, function)
        return
    yield node, function
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}".removeprefix(".")
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in NOT_CODE:
                yield from places(child, function)


def faults_in(source: str, path: str) -> list[Fault]:
    """All faults of a source text, in order."""
    data = source.encode()
    begins = [0]
    for line in data.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    found = []
    for node, function in places(ast.parse(source)):
        for kind, changes in KINDS.items():
            for at, after in changes(node):
                start, end = begins[at.lineno - 1] + at.col_offset, begins[at.end_lineno - 1] + at.end_col_offset
                found.append(Fault(path, at.lineno, kind, function, data[start:end].decode(), after, start, end))
    return found


def mutated(source: str, fault: Fault) -> str:
    """The source text with the fault."""
    data = source.encode()
    return (data[: fault.start] + fault.after.encode() + data[fault.end :]).decode()


def sources() -> list[str]:
    """The files that get faults."""
    return [str(path.relative_to(ROOT)) for f in FOLDERS for path in sorted((ROOT / "fedjax_async" / f).glob("*.py"))]


def excluded(fault: Fault) -> bool:
    """Whether ``EXCLUDED`` names the fault, its function or its file."""
    function = f"{fault.path}:{fault.function}"
    return bool({fault.path, function, f"{function}:{fault.before}"} & EXCLUDED.keys())


def choose(faults: list[Fault], seed: int, count: int) -> list[Fault]:
    """``count`` faults: folders in turn, in each the kind with fewest so far, then a file of it, then a fault of it.

    Ties are broken by a hash, so one fault more or less in the package, or in ``EXCLUDED``, leaves most others chosen.
    """

    def rank(*parts: Any) -> str:
        return hashlib.sha256(repr((seed, *parts)).encode()).hexdigest()

    left: dict[str, dict[str, list[Fault]]] = {}
    for fault in faults:
        left.setdefault(fault.path.split("/")[1], {}).setdefault(fault.kind, []).append(fault)
    kinds: Counter[str] = Counter()
    chosen: list[Fault] = []
    while len(chosen) < count and any(left.values()):
        for folder in sorted(name for name in left if left[name]):
            offered = left[folder]
            kind = min(offered, key=lambda name: (kinds[name], rank(folder, name, len(chosen))))
            fault = min(offered[kind], key=lambda one: (rank(one.path, len(chosen)), rank(*one.name[2:])))
            offered[kind].remove(fault)
            if not offered[kind]:
                del offered[kind]
            kinds[kind] += 1
            chosen.append(fault)
    return chosen[:count]
