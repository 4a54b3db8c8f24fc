"""What cannot be pickled is named: the path to it, why, and what to do."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import pytest
from travelling import Indexer, Pair, Record, Stateful, make

from cseq.encoding import unpicklable
from cseq.encoding.pickling import dump

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import RunScript


def refers_to(lock: object) -> Callable[[], object]:
    """Return a function that refers to something."""
    return lambda: lock


def has_attribute(lock: object) -> type:
    """Return a class with an attribute."""

    class Holder:
        shared = lock

    return Holder


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        (LOCK, "worker"),
        (Indexer(lock=LOCK), "worker.lock"),
        (functools.partial(make, Indexer(lock=LOCK)), "worker.args[0].lock"),
        (
            functools.partial(make, 1, x={"deep": [0, (1, LOCK)]}),
            "worker.keywords['x']['deep'][1][1]",
        ),
        (Indexer([Indexer(), Indexer(Pair(1, LOCK))]).data, "worker[1].data.right"),
        (Record({"a": {1: LOCK}}), "worker.value['a'][1]"),
        (Stateful(LOCK), "worker.renamed"),
        (Indexer({LOCK}), "worker.data"),
        (Indexer(LOCK).read, "worker.__self__.data"),
        (refers_to(Indexer(LOCK)), "worker variable 'lock'.data"),
        (has_attribute(LOCK), "worker.shared"),
        (Indexer(has_attribute([LOCK])), "worker.data.shared[0]"),
    ],
)
def test_what_cannot_be_pickled_is_named(obj: object, path: str) -> None:
    """The TypeError names the argument, the path to the culprit, why, and what to do."""
    with pytest.raises(TypeError) as caught:
        dump(obj)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "cannot pickle '_thread.lock' object" in message
    assert "where they are first used" in message
    assert "not before, for a look at a sample" in message
    assert "or use MTSequence" in message
    assert caught.value.__suppress_context__  # one sentence, no tracebacks of cseq


def test_the_argument_has_its_own_name() -> None:
    """`name` is what messages call the object."""
    with pytest.raises(TypeError, match=r"^out_type\.lock: .*copy of the out_type"):
        dump(Indexer(lock=LOCK), name="out_type")


def test_a_global_that_cannot_be_pickled_is_named(run_script: RunScript) -> None:
    """A script's function takes its global names along; the message says which one."""
    done = run_script(
        "import threading\nfrom cseq.encoding.pickling import dump\nlock = threading.Lock()\n"
        "class Worker:\n    def __getitem__(self, i): return lock\n"
        "try:\n    dump(Worker)\nexcept TypeError as error:\n    print(error)"
    )
    assert done.stdout.startswith("worker.__getitem__ variable 'lock': cannot pickle"), done.stderr


def test_a_way_back_is_no_culprit() -> None:
    """An object that refers to itself does not hide what is to blame."""
    endless = Indexer()
    endless.data, endless.__dict__["late"] = endless, {"lock": LOCK}
    with pytest.raises(TypeError, match=r"^worker\.late\['lock'\]: "):
        dump(endless)


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep and wide an object is, the search gives up, and the error is raised."""
    monkeypatch.setattr(unpicklable, "MOST_PARTS", 10)
    with pytest.raises(TypeError, match=r"^worker: cannot pickle"):
        dump([*range(100), LOCK])
    monkeypatch.setattr(unpicklable, "MOST_PARTS", 10**6)
    monkeypatch.setattr(unpicklable, "MOST_LEVELS", 3)
    with pytest.raises(TypeError, match=r"^worker\[0\]\[0\]\[0\]: cannot pickle"):
        dump([[[[[LOCK]]]]])


def test_an_object_whose_own_pickling_fails_is_named() -> None:
    """What a class itself raises is in the message, under the path of its object."""

    class Stubborn:
        def __reduce__(self) -> str:
            raise RuntimeError("not for travel")

    with pytest.raises(TypeError, match=r"^worker\.data: not for travel"):
        dump(Indexer(Stubborn()))
