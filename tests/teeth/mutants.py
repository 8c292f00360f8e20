"""Faults that a seed draws: one operator, constant, condition, statement or pair of arguments made wrong.

The operators are those of cosmic-ray and their like, on Python's own syntax trees: cosmic-ray itself brings
thirteen packages along, among them a database and a web client. Only bodies of functions change. Signatures,
decorators and annotations stay, because DDP and Numba read them; so do texts, and what a message says.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import PurePosixPath

from tests.support.source import MODULES, ROOT

LEFT_OUT = ("gradwire_lab", "cli", "tools")
"""Rooms in which no fault is drawn."""
COMPILED = "kernels/cpu"
"""Faults in this folder compile kernels anew."""

_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
_ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Add(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.Add(),
    ast.Pow: ast.Mult(),
    ast.LShift: ast.RShift(),
    ast.RShift: ast.LShift(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
    ast.BitXor: ast.BitAnd(),
}
_FORMS = {"isinstance", "issubclass", "cast", "hasattr", "getattr", "setattr"}
"""Calls whose arguments cannot be swapped without a `TypeError`."""
_SYMMETRIC = {"min", "max", "minimum", "maximum", "gcd", "lcm", "equal"}
"""Calls that return the same whichever of two arguments comes first."""
_SPEAKS = {"warn", "debug", "info", "warning", "error", "print"}
"""Calls that only say something: they can be removed, and their arguments are texts."""
_FOR_READERS = {"strict", "stacklevel"}
"""Arguments by name that change nothing in a program that is right."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fault:
    """One file of the package made wrong.

    `path` is relative to the root of the tree, and `text` is the whole file. `function` is where the fault
    is, as `path:Class.method`. `change` shows the old code and the new.
    """

    path: str
    function: str
    change: str
    text: str
    number: int = 0
    """Among equal changes of one function."""
    line: int = 0
    """Of the old code; 0 where the change says it all."""

    @property
    def name(self) -> str:
        """Stays the same when other functions of the file change, and when lines move."""
        return _hash(f"{self.function} {self.change} {self.number}")[:10]

    @property
    def room(self) -> str:
        """Its folder: `step`, `kernels/cpu`; "." for gradwire's own files."""
        return room(self.path)


def room(path: str) -> str:
    """The folder of a source file: from gradwire on, and in the laboratory with that package's name."""
    return PurePosixPath(path.removeprefix("src/").removeprefix("gradwire/")).parent.as_posix()


def drawn(seed: str, compiled: int, paths: Iterable[str] = ()) -> Iterator[Fault]:
    """All faults in the order that `seed` gives, one for each line; of `kernels/cpu` the first `compiled`.

    `paths` are files of the package, by default all in which faults are drawn. Lines count alike, not places
    on them: otherwise most faults would be constants in tables.
    """
    lines: dict[tuple[str, int], list[Place]] = {}
    for path in paths or _paths():
        for place in places(path, (ROOT / path).read_bytes()):
            lines.setdefault((path, place.line), []).append(place)

    def order(place: Place) -> str:
        return _hash(f"{seed} {place.function} {place.change} {place.number}")

    chosen = [min(places, key=order) for places in lines.values()]
    for place in sorted(chosen, key=lambda each: _hash(order(each))):
        if room(place.path) == COMPILED:
            compiled -= 1
            if compiled < 0:
                continue
        yield place.fault()


@dataclass(frozen=True)
class Place:
    """Where something of a file can be made wrong, and what it becomes."""

    path: str
    function: str
    change: str
    number: int
    line: int
    start: int
    """In bytes of the file."""
    end: int
    new: str

    def fault(self) -> Fault:
        """The whole file with it."""
        old = (ROOT / self.path).read_bytes()
        text = old[: self.start] + self.new.encode() + old[self.end :]
        return Fault(self.path, self.function, self.change, text.decode(), self.number, self.line)


def _paths() -> Iterator[str]:
    for module in MODULES:
        path = module.path.relative_to(ROOT).as_posix()
        if room(path).split("/")[0] not in LEFT_OUT:
            yield path


@cache
def places(path: str, source: bytes) -> tuple[Place, ...]:
    """All that can be made wrong in the text of a file."""
    starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    equal: Counter[tuple[str, str]] = Counter()
    found = []
    for function, old, new in _changes(ast.parse(source)):
        text = ast.unparse(new)
        change = f"{_short(old)} → {_short(new)}"
        found.append(
            Place(
                path,
                f"{path}:{function}",
                change,
                equal[function, change],
                old.lineno,
                starts[old.lineno - 1] + old.col_offset,
                starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0),
                f"({text})" if isinstance(old, ast.expr) else text,
            )
        )
        equal[function, change] += 1
    return tuple(found)


def _short(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 100 else f"{text[:99]}…"


Changed = ast.expr | ast.stmt


def _changes(tree: ast.Module) -> Iterator[tuple[str, Changed, Changed]]:
    """(name of the function, old node, new node) of all that can be made wrong."""

    def within(node: ast.AST, name: str, inside: bool) -> Iterator[tuple[str, Changed, Changed]]:
        for each in _children(node):
            if isinstance(each, Function | ast.ClassDef):
                if not _is_for_readers(each):
                    yield from within(each, f"{name}.{each.name}".lstrip("."), isinstance(each, Function))
                continue
            if inside:
                yield from ((name, old, new) for old, new in _wrong(each))
            yield from within(each, name, inside)

    return within(tree, "", False)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Those in which something can be made wrong."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from (each for each in (node.value,) if each is not None)
        case ast.JoinedStr() | ast.Raise():
            return  # texts
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in _SPEAKS:
            return
        case ast.Call(func=ast.Name(id="cast"), args=[_, value]):
            yield value
        case ast.keyword(arg=name) if name in _FOR_READERS:
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            yield from node.orelse
        case _:
            yield from ast.iter_child_nodes(node)


def _is_for_readers(node: Function | ast.ClassDef) -> bool:
    return node.name in ("__repr__", "__str__") or any(
        ast.unparse(each) == "overload" for each in node.decorator_list
    )


def _wrong(node: ast.AST) -> Iterator[tuple[Changed, Changed]]:
    """What `node` can become, or the condition that it has."""
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                other = copy.copy(node)
                other.ops = [*ops[:place], _COMPARISONS[type(op)], *ops[place + 1 :]]
                yield node, other
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            if not (_is_text(left) or _is_text(right)):
                yield node, ast.BinOp(left, _ARITHMETIC[type(op)], right)
        case ast.AugAssign(target=target, op=op, value=value):
            if type(op) in _ARITHMETIC and not _is_text(value):
                yield node, ast.AugAssign(target, _ARITHMETIC[type(op)], value)
            yield node, ast.Pass()
        case ast.BoolOp(op=op, values=values):
            yield node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield node, operand
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield node, ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield node, ast.Constant(2 * value or 1.0)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) not in ("None", "NotImplemented"):
            yield node, ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Raise():
            yield node, ast.Pass()
        case ast.Assign(targets=targets) if all(
            isinstance(each, ast.Attribute | ast.Subscript) for each in targets
        ):
            yield node, ast.Pass()
        case ast.If(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):  # which are made wrong anyway
                yield test, ast.UnaryOp(ast.Not(), test)
        case ast.comprehension(ifs=ifs):
            yield from ((test, ast.UnaryOp(ast.Not(), test)) for test in ifs)
        case ast.Call(func=func, args=[one, two, *_]) if not isinstance(one, ast.Starred):
            called = ast.unparse(func)
            is_same = called.rpartition(".")[2] in _SYMMETRIC or ast.unparse(one) == ast.unparse(two)
            if not (is_same or called in _FORMS or isinstance(two, ast.Starred)):
                other = copy.copy(node)
                other.args = [two, one, *node.args[2:]]
                yield node, other


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def functions(text: str) -> dict[str, str]:
    """Each function of a source as `Class.method`, and its syntax, with that of functions inside it."""
    found: dict[str, str] = {}

    def within(node: ast.AST, name: str) -> None:
        for each in ast.iter_child_nodes(node):
            inner = name
            if isinstance(each, Function | ast.ClassDef):
                inner = f"{name}.{each.name}".lstrip(".")
                if isinstance(each, Function):
                    found[inner] = found.get(inner, "") + ast.dump(each)  # a property and its setter
            within(each, inner)

    within(ast.parse(text), "")
    return found


def changed(before: str, after: str) -> set[str]:
    """Functions of `after` that `before` does not have, or has otherwise."""
    old = functions(before)
    return {name for name, syntax in functions(after).items() if old.get(name) != syntax}


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
