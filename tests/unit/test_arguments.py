"""The arguments of `MSequence`: where they are listed for type checkers, the lists agree."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import cseq
from cseq import arguments
from cseq.order.shuffled import Shuffled

FOLDER = Path(cseq.__file__).parent
SHOWN = {
    kind.__name__: {
        name: parameter.annotation for name, parameter in inspect.signature(kind).parameters.items()
    }
    for kind in (cseq.MSequence, cseq.MPSequence, cseq.MTSequence, cseq.RaySequence)
}


def class_named(file: str, name: str) -> ast.ClassDef:
    """Find a class in the source, also one that exists for type checkers only."""
    tree = ast.parse(Path(FOLDER, file).read_text(encoding="utf-8"))
    [found] = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    return found


def fields(name: str) -> dict[str, str]:
    """Give the keys of a TypedDict, and their types as written."""
    nodes = (n for n in class_named("arguments.py", name).body if isinstance(n, ast.AnnAssign))
    return {ast.unparse(n.target): ast.unparse(n.annotation) for n in nodes}


def overloads(name: str) -> list[dict[str, str]]:
    """Give the parameters of each overload of a class's `__init__`, and their types as written."""
    return [
        {a.arg: ast.unparse(a.annotation) for a in (*n.args.args[1:], *n.args.kwonlyargs)}
        for n in class_named("kinds.py" if name == "_Kind" else "sequence.py", name).body
        if isinstance(n, ast.FunctionDef) and ast.unparse(n.decorator_list[:1]) == "overload"
    ]


def test_all_classes_show_the_same_arguments() -> None:
    """`MPSequence` and `MTSequence` show those of `MSequence` but `thread_type`, in this order."""
    others = dict(SHOWN["MSequence"])
    del others["thread_type"]
    assert list(SHOWN["MPSequence"].items()) == list(others.items())
    assert list(SHOWN["MTSequence"].items()) == list(others.items())
    assert list(SHOWN["RaySequence"].items()) == list(others.items())


def test_the_keywords_for_type_checkers() -> None:
    """`Options` are the keyword-only arguments; with `Keywords`, all that overloads leave out."""
    parameters = inspect.signature(cseq.MSequence).parameters.values()
    options = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert fields("Options") == options
    named = {"worker", "dset_size", "num_workers", "out_type", "thread_type"}
    rest = {name: kind for name, kind in SHOWN["MSequence"].items() if name not in named}
    assert fields("Options") | fields("Keywords") == rest


@pytest.mark.parametrize(("name", "kind"), [("MSequence", "MSequence"), ("_Kind", "MPSequence")])
def test_the_overloads(name: str, kind: str) -> None:
    """The last overload has the positional arguments in order; the others fix `out_type`."""
    *nulls, whole = overloads(name)
    shown = SHOWN[kind]
    options = fields("Options")
    assert list(whole.items()) == [item for item in shown.items() if item[0] not in options]
    assert [null.pop("worker") for null in nulls] == [
        "Callable[[], Indexer[B_co]]",
        "Indexer[B_co]",
    ]
    for null in nulls:
        assert null.pop("out_type") == "Literal['null']"
        assert null.items() <= whole.items()
        assert null.keys() == whole.keys() - fields("Keywords") - {"worker", "out_type"}


def test_the_number_of_converters() -> None:
    """By default a quarter of the workers, but up to four; none without workers."""
    assert [arguments.converters_of(n, None) for n in (0, 1, 3, 5, 16, 20)] == [0, 1, 3, 4, 4, 5]
    assert arguments.converters_of(0, 3) == 0
    assert arguments.converters_of(3, 3) == 3
    with pytest.raises(ValueError, match="num_converters=4 exceeds num_workers=3"):
        arguments.converters_of(3, 4)


def test_the_number_of_samples_of_a_worker() -> None:
    """The length of an object that has one; a class has none, and then the order may know."""
    assert arguments.samples_of(range(7), Shuffled(9)) == 7
    assert arguments.samples_of(dict, Shuffled(9)) == 9
    with pytest.raises(TypeError, match="dset_size is missing"):
        arguments.samples_of(dict, Shuffled())
