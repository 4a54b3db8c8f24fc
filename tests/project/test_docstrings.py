"""The examples in the docstrings of the public names, run as shown."""

import doctest
import inspect

import numpy as np
import pytest

import cseq
from cseq import tokens

LOADERS = ("DataLoader", "StatefulDataLoader")
NAMES = [*cseq.__all__, "packed", "progress", *LOADERS]
NAMES += [f"tokens.{name}" for name in tokens.__all__]
# Objects that a program only receives: errors, records, a protocol.
GIVEN = {
    *("CseqError", "RemoteTraceback", "WorkerDied", "WorkerError", "WorkerTimeout"),
    *("Indexer", "Stats", "WorkerInfo", "tokens.Documents", "tokens.Piece"),
}


def examples_of(name):
    """Return the examples of a public name and of its methods."""
    if name in LOADERS:
        pytest.importorskip("torch", reason="it is torch's")
    thing = cseq
    for part in name.split("."):
        thing = getattr(thing, part)
    members = vars(thing) if isinstance(thing, type) else {}
    documented = {name: thing} | {
        f"{name}.{key}": member for key, member in members.items() if not key.startswith("_")
    }
    shared = {"__name__": "__main__", "cseq": cseq, "np": np, "tokens": tokens}
    parse = doctest.DocTestParser().get_doctest
    return [
        parse(inspect.getdoc(one) or "", dict(shared), title, None, 0)
        for title, one in documented.items()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_examples_print_what_they_show(name, tmp_path, monkeypatch):
    """Each example of a public name prints what stands below it."""
    # Some examples write files.
    monkeypatch.chdir(tmp_path)
    printed = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    failed = [test.name for test in examples_of(name) if runner.run(test, out=printed.append)[0]]
    assert not failed, "".join(printed)


@pytest.mark.parametrize("name", sorted(set(NAMES) - GIVEN))
def test_each_public_name_has_an_example(name):
    """The docs show how a program calls it."""
    assert examples_of(name)[0].examples


def test_states_are_explained_with_their_parameters():
    """`load_state_dict` of each class has its parameters, its errors and an example."""
    pytest.importorskip("torch", reason="one of them is torch's")
    for kind in (cseq.MSequence, cseq.DataLoader):
        said = inspect.getdoc(kind.load_state_dict) or ""
        for part in ("Parameters", "Raises", "Examples"):
            assert f"{part}\n---" in said
