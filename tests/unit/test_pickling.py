"""Objects travel to other processes: uncopied, by value where they have to."""

from __future__ import annotations

import functools
import gc
import pickle
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from travelling import (
    Indexer,
    Pair,
    Record,
    arrives_elsewhere,
    make,
    nbytes,
    read,
    travel,
    write_batch,
)

from cseq.encoding.pickling import dump, dumps
from cseq.processes.launcher import start_methods

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import RunScript

MEGA = 1 << 20

# --- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "obj",
    [
        Indexer,
        make,
        functools.partial(make, 1, shuffle=True),
        {"a": [1, 2.5, "text", b"bytes", None], "b": ({1}, frozenset({2}))},
    ],
)
def test_what_pickles_arrives(obj: object) -> None:
    """A class, a factory, a partial, a structure: `read` gives what `dump` was given."""
    arrived = travel(obj)
    if isinstance(obj, functools.partial):
        assert (arrived.func, arrived.args, arrived.keywords) == (obj.func, obj.args, obj.keywords)
    else:
        assert arrived == obj


leaves = st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Record, inner)
    ),
    max_leaves=12,
)


@given(trees)
def test_any_structure_arrives(tree: Any) -> None:
    """Whatever the nesting, the object is equal after its journey."""
    assert travel(tree) == tree


@pytest.mark.parametrize(
    "array",
    [
        np.arange(MEGA, dtype=np.float32),
        np.asfortranarray(np.arange(MEGA).reshape(1024, 1024)),
        np.arange(MEGA).reshape(1024, 1024)[:, ::3],
        np.arange(MEGA)[::-1],
        np.zeros((0, 7)),
        np.array(3.5),
        np.array(["one", "three"]),
        np.zeros(999, dtype=[("x", "f4"), ("y", "i8", 3)]),
        np.array([1, "two", None], dtype=object),
        np.arange(MEGA).astype("M8[s]"),
    ],
    ids=lambda array: f"{array.dtype.kind}-{array.shape}-{array.strides}",
)
def test_arrays_arrive_equal_writable_and_aligned(array: np.ndarray[Any, Any]) -> None:
    """Type, shape and values survive; the copy may be written to; large ones are aligned."""
    arrived = travel(Indexer(array)).data
    assert arrived.dtype == array.dtype
    assert arrived.shape == array.shape
    assert (arrived == array).all()
    assert arrived.flags.writeable
    if array.nbytes > 4096:
        assert arrived.ctypes.data % 64 == 0
        assert not isinstance(arrived.base, bytes)


def test_a_large_array_is_not_copied_into_the_pickle() -> None:
    """Its buffers refer to the object's own memory, and its pickle stays small."""
    array = np.arange(MEGA)
    indexer = Indexer(array, again=array)
    made = dump(indexer)
    assert len(made.data) < 1000
    assert [view.nbytes for view in made.buffers] == [array.nbytes]
    assert np.shares_memory(np.frombuffer(made.buffers[0], np.uint8), array)
    assert array.nbytes < nbytes(indexer) < array.nbytes + 4096


def test_small_buffers_stay_in_the_pickle() -> None:
    """Many tiny arrays do not take a place in the file each."""
    made = dump([np.arange(8) for _ in range(100)])
    assert made.buffers == []
    assert len(made.data) < 20000


def test_what_goes_by_value_keeps_nothing_of_the_caller() -> None:
    """Nothing that the caller holds lives on until the garbage collector comes by."""

    def caller() -> weakref.ref[Indexer]:
        mine = Indexer()
        dump(lambda: 1)
        return weakref.ref(mine)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_what_one_reader_writes_no_other_sees() -> None:
    """Readers map the file copy on write."""
    laid = write_batch(Indexer(np.zeros(MEGA)))
    first, second = read(*laid), read(*laid)
    first.data[:] = 1
    third = read(*laid)
    assert first.data.sum() == MEGA
    assert not second.data.any()
    assert not third.data.any()


# --- mapped files and tensors --------------------------------------------------------------------


@pytest.fixture
def mapped(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that maps a file of numbers."""
    np.arange(MEGA, dtype=np.int32).tofile(tmp_path / "numbers")

    def map_file(mode: Any = "r+", offset: int = 0) -> Any:
        return np.memmap(tmp_path / "numbers", np.int32, mode, offset, shape=(1000, 1000))

    return map_file


@pytest.mark.parametrize("offset", [0, 4, 4096 * 5 + 8])
@pytest.mark.parametrize(
    "part", [np.s_[:], np.s_[7:999], np.s_[3], np.s_[5:6, 2:999]], ids=["all", "rows", "row", "cut"]
)
def test_a_mapped_file_is_mapped_again(mapped: Callable[..., Any], offset: int, part: Any) -> None:
    """A part of a file that is mapped takes no room: workers map the same part of that file."""
    array = mapped(offset=offset)[part]
    assert nbytes(Indexer(array)) < 2000
    arrived = travel(Indexer(array)).data
    assert isinstance(arrived, np.memmap)
    assert (arrived == array).all()


def test_a_worker_does_not_write_to_the_trainers_file(mapped: Callable[..., Any]) -> None:
    """A mapping for reading stays one; of one for writing, the worker's changes are its own."""
    assert not travel(mapped("r")).flags.writeable
    arrived = travel(mapped("r+"))
    arrived[:] = 0
    assert mapped("r")[0, 1] == 1


@pytest.mark.parametrize(
    "case",
    ["private", "columns", pytest.param("gone", marks=pytest.mark.needs("POSIX")), "result"],
)
def test_a_mapping_that_cannot_be_made_again_is_copied(
    mapped: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    """Private changes, columns, deleted files and mere results of a computation travel as data."""
    array = mapped("c" if case == "private" else "r+")
    array[0, 0] = 77
    if case == "columns":
        array = array[:, 5:500]
    if case == "gone":
        (tmp_path / "numbers").unlink()
    if case == "result":
        array = array + 1
    assert nbytes(array) > array.nbytes
    assert (travel(array) == array).all()


def test_tensors_are_not_copied_into_the_pickle() -> None:
    """A plain CPU tensor goes out of band like an array."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(MEGA)
    made = dump(Indexer(tensor))
    assert len(made.data) < 1000
    assert np.shares_memory(np.frombuffer(made.buffers[0], np.uint8), tensor.numpy())
    arrived = travel(Indexer(tensor)).data
    assert torch.equal(arrived, tensor)
    arrived[0] = 5  # its own memory, writable


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.12
@pytest.mark.parametrize(
    "change",
    [
        lambda torch, t: t.to(torch.bfloat16),
        lambda torch, t: t.requires_grad_(),
        lambda torch, t: t.view(2, -1).t(),
        lambda torch, t: t.to_sparse(),
    ],
    ids=["bfloat16", "grad", "transposed", "sparse"],
)
def test_other_tensors_arrive_too(change: Callable[..., Any]) -> None:
    """What numpy has no word for goes torch's own way."""
    torch = pytest.importorskip("torch")
    tensor = change(torch, torch.ones(32))
    arrived = travel(Indexer(tensor)).data
    assert arrived.dtype == tensor.dtype
    assert arrived.requires_grad == tensor.requires_grad
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


# --- by reference and by value ------------------------------------------------------------------


def test_plain_workers_need_no_cloudpickle() -> None:
    """It is imported in a worker process only when something has gone by value."""
    plain, by_value = functools.partial(Record, [1, 2]), functools.partial(Record, lambda: 1)
    assert arrives_elsewhere(plain, "'cloudpickle' in sys.modules") == "False"
    assert arrives_elsewhere(by_value, "'cloudpickle' in sys.modules") == "True"


def test_cloudpickles_own_list_of_modules_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What goes by value for us goes by reference for the user's own uses of cloudpickle."""
    cloudpickle = pytest.importorskip("cloudpickle")
    module = types.ModuleType("made_by_hand")
    exec("class Worker: pass", vars(module))
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    before = set(cloudpickle.list_registry_pickle_by_value())
    dump(vars(module)["Worker"])
    assert set(cloudpickle.list_registry_pickle_by_value()) == before


SCRIPT = """
import pickle, subprocess, sys
from dataclasses import dataclass
import numpy as np
from cseq.encoding.pickling import dump

scale = np.full(4, 10)

@dataclass
class Batch:
    x: object

class Worker:
    def __init__(self, offset): self.offset = offset
    def __getitem__(self, i): return Batch(scale * i + self.offset)

code = '''
import pickle, sys
worker, classes = pickle.loads(sys.stdin.buffer.read())
batch = worker[3]
print(batch.x.tolist())
sys.stdout.flush()
sys.stdout.buffer.write(pickle.dumps(batch))
'''
made = dump(Worker(7))
assert not made.buffers
done = subprocess.run(
    [sys.executable, "-c", code], input=made.data, stdout=subprocess.PIPE, check=True
)
line, back = done.stdout.split(b"\\n", 1)
print(line.decode().strip(), type(pickle.loads(back)) is Batch)
"""


def test_a_script_goes_by_value_and_its_classes_come_back_as_its_own(
    run_script: RunScript,
) -> None:
    """A worker from ``__main__`` works elsewhere, and what it returns is of the script's class."""
    done = run_script(SCRIPT)
    assert done.stdout == "[37, 37, 37, 37] True\n", done.stderr


RAISING = """
import sys
import cseq

def helper(indices):
    raise ValueError("bad")  # this line

class Worker:
    def __getitem__(self, indices):
        return helper(indices)

manager = cseq.MPSequence(Worker, 4, 1, out_type="null", start_method=sys.argv[1])
try:
    with manager.start() as batches:
        next(iter(batches))
except ValueError as error:
    print(error.__cause__)
"""


@pytest.mark.parametrize("method", [name for name in start_methods() if name != "fork"])
def test_a_traceback_names_the_line_of_a_script(
    run_script: RunScript, tmp_path: Path, method: str
) -> None:
    """What went by value has its file's name, so that the source is shown."""
    done = run_script(RAISING, method)
    line = f"""File "{tmp_path / "script.py"}", line 6, in helper\n    raise ValueError("bad")"""
    assert line in done.stdout, done.stderr


def test_reading_in_the_trainer_leaves_its_main_alone() -> None:
    """Names in ``__main__`` that exist are not replaced."""
    main = sys.modules["__main__"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class UniqueName: pass", namespace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "UniqueName", "mine", raising=False)
        travel(namespace["UniqueName"])
        assert vars(main)["UniqueName"] == "mine"


# --- small things between pools ------------------------------------------------------------------


def test_dumps_takes_local_classes() -> None:
    """What pickle cannot do goes by value, and is the same class where it came from."""

    class LocalError(Exception):
        pass

    error = pickle.loads(dumps(LocalError(1, 2)))
    assert type(error) is LocalError
    assert error.args == (1, 2)
