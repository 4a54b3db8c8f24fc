"""Objects travel to other processes: uncopied, by value if needed, or an error says why not."""

import gc
import importlib
import sys
import threading
import types
import weakref
from functools import partial

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from travelling import (
    Indexer,
    Pair,
    Record,
    Stateful,
    arrives_elsewhere,
    goes_by_value,
    nbytes,
    travel,
)

import cseq
from cseq.encoding.pickling import dump, named_here
from cseq.processes.launcher import start_methods

MEGA = 1 << 20

leaves = st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)


def grown(inner):
    """Return the containers of such parts."""
    records = st.builds(Pair, inner, inner) | st.builds(Record, inner)
    return st.lists(inner) | st.dictionaries(st.text(), inner) | records


@given(st.recursive(leaves, grown, max_leaves=12))
def test_any_structure_arrives(tree):
    """For any nesting, the object is equal after its journey."""
    assert travel(tree) == tree


@pytest.mark.parametrize(
    "array",
    [
        np.arange(MEGA, dtype=np.float32), np.arange(MEGA)[::-1], np.arange(MEGA).astype("M8[s]"),
        np.asfortranarray(np.arange(MEGA).reshape(1024, 1024)),
        np.arange(MEGA).reshape(1024, 1024)[:, ::3], np.zeros((0, 7)), np.array(3.5),
        np.array(["one", "three"]), np.zeros(999, dtype=[("x", "f4"), ("y", "i8", 3)]),
        np.array([1, "two", None], dtype=object),
    ],
    ids=lambda array: f"{array.dtype.kind}-{array.shape}-{array.strides}",
)  # fmt: skip
def test_arrays_arrive_equal_writable_and_aligned(array):
    """Type, shape and values stay; the copy is writable; large arrays are aligned."""
    arrived = travel(Indexer(array)).data
    assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
    assert (arrived == array).all()
    assert arrived.flags.writeable
    if array.nbytes > 4096:
        assert arrived.ctypes.data % 64 == 0
        assert not isinstance(arrived.base, bytes)


def test_a_large_array_is_not_copied_into_the_pickle():
    """Its buffers are the object's own memory, and its pickle stays small."""
    array = np.arange(MEGA)
    indexer = Indexer(array, again=array)
    made = dump(indexer)
    assert len(made.data) < 1000
    assert [view.nbytes for view in made.buffers] == [array.nbytes]
    assert np.shares_memory(np.frombuffer(made.buffers[0], np.uint8), array)
    assert array.nbytes < nbytes(indexer) < array.nbytes + 4096


def test_what_goes_by_value_keeps_nothing_of_the_caller():
    """Nothing of the caller's waits for the garbage collector."""

    def caller():
        mine = Indexer()
        dump(lambda: 1)
        return weakref.ref(mine)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


@pytest.fixture
def mapped(tmp_path):
    """Return a function that maps a file of numbers."""
    np.arange(MEGA, dtype=np.int32).tofile(tmp_path / "numbers")
    return partial(np.memmap, tmp_path / "numbers", np.int32, shape=(1000, 1000))


@pytest.mark.parametrize("offset", [0, 4, 4096 * 5 + 8])
@pytest.mark.parametrize(
    "part", [np.s_[:], np.s_[7:999], np.s_[3], np.s_[5:6, 2:999]], ids=["all", "rows", "row", "cut"]
)
def test_a_mapped_file_is_mapped_again(mapped, offset, part):
    """Part of a mapped file takes no room: workers map the same part."""
    array = mapped("r+", offset)[part]
    assert nbytes(Indexer(array)) < 2000
    arrived = travel(Indexer(array)).data
    assert isinstance(arrived, np.memmap)
    assert (arrived == array).all()


def test_a_worker_does_not_write_to_the_trainers_file(mapped):
    """A read-only mapping stays one; of a writable one, the worker's changes are its own."""
    assert not travel(mapped("r")).flags.writeable
    arrived = travel(mapped("r+"))
    arrived[:] = 0
    assert mapped("r")[0, 1] == 1


@pytest.mark.parametrize(
    "case", ["private", "columns", pytest.param("gone", marks=pytest.mark.needs("POSIX")), "result"]
)
def test_a_mapping_that_cannot_be_made_again_is_copied(mapped, tmp_path, case):
    """Private changes, columns, deleted files and results of computations travel as data."""
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


def test_tensors_are_not_copied_into_the_pickle():
    """A plain CPU tensor travels out of band like an array."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(MEGA)
    made = dump(Indexer(tensor))
    assert len(made.data) < 1000
    assert np.shares_memory(np.frombuffer(made.buffers[0], np.uint8), tensor.numpy())
    arrived = travel(Indexer(tensor)).data
    assert torch.equal(arrived, tensor)
    arrived[0] = 5


def test_plain_workers_need_no_cloudpickle():
    """A worker process imports it only when an object has travelled by value."""
    plain, by_value = partial(Record, [1, 2]), partial(Record, lambda: 1)
    assert arrives_elsewhere(plain, "'cloudpickle' in sys.modules") == "False"
    assert arrives_elsewhere(by_value, "'cloudpickle' in sys.modules") == "True"


SCRIPT = """
import pickle, subprocess, sys
from cseq.encoding.pickling import dump
class Batch: pass
code = "import pickle, sys; batch = pickle.load(sys.stdin.buffer)[0](); "
code += "sys.stdout.buffer.write(pickle.dumps(batch))"
command = [sys.executable, "-c", code]
done = subprocess.run(command, input=dump(Batch).data, stdout=subprocess.PIPE, check=True)
print(type(pickle.loads(done.stdout)) is Batch)
"""


def test_classes_of_a_script_come_back_as_its_own(run_script):
    """A class from ``__main__`` travels by value, and has its name in the other process."""
    done = run_script(SCRIPT)
    assert done.stdout == "True\n", done.stderr


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
def test_a_traceback_names_the_line_of_a_script(run_script, tmp_path, method):
    """Code that travelled by value has its file's name, so its source is shown."""
    done = run_script(RAISING, method)
    line = f"""File "{tmp_path / "script.py"}", line 6, in helper\n    raise ValueError("bad")"""
    assert line in done.stdout, done.stderr


def test_reading_in_the_trainer_leaves_its_main_alone():
    """Existing names in ``__main__`` are not replaced."""
    namespace = {"__name__": "__main__"}
    exec("class UniqueName: pass", namespace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("__main__.UniqueName", "mine", raising=False)
        travel(namespace["UniqueName"])
        assert vars(sys.modules["__main__"])["UniqueName"] == "mine"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder on the path; the test forgets its imports."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if str(tmp_path) in str(getattr(module, "__file__", tmp_path)):
            del sys.modules[name]


SOURCE = "class Worker:\n    answer = 42\n    def __getitem__(self, i): return helper(i)\n"
SOURCE += "def helper(i): return i + Worker.answer\n"


def test_what_can_be_imported_goes_by_reference(folder):
    """A new process imports a module that it finds, without a pickle."""
    (folder / "on_disk.py").write_text(SOURCE)
    importlib.invalidate_caches()
    module = importlib.import_module("on_disk")
    made = dump(module.Worker())
    assert b"helper" not in made.data
    assert made.modules == ("on_disk",)
    assert arrives_elsewhere(module.Worker(), "obj[1], type(obj).__module__") == "(43, 'on_disk')"


@pytest.fixture
def by_hand(monkeypatch):
    """Make a module that no other process can import."""
    module = types.ModuleType("made_by_hand")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    return module


def test_a_module_that_no_worker_can_import_is_named(by_hand):
    """The start of the worker names it, with the remedy; cloudpickle may be told to include it."""
    module = by_hand
    worker = vars(module)["Worker"]
    options = {"batch_size": 2, "shuffle": False, "out_type": "null", "start_method": "spawn"}
    manager = cseq.MPSequence(worker, 4, 1, **options)
    with (
        manager.start() as batches,
        pytest.raises(ModuleNotFoundError, match="made_by_hand") as caught,
    ):
        next(iter(batches))
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any("call cloudpickle.register_pickle_by_value" in each for each in told)
    cloudpickle.register_pickle_by_value(module)
    try:
        with manager.start() as batches:
            assert [batch.tolist() for batch in batches] == [[42, 43], [44, 45]]
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_packages_and_their_modules_go_by_reference(folder):
    """It covers modules in packages, packages without __init__.py, and modules made by modules."""
    for place in ("plain", "pack"):
        (folder / place).mkdir()
        (folder / place / "inner.py").write_text(
            "import sys, types\nclass Inner: pass\nclass Made: pass\n"
            "Made.__module__ = __name__ + '.made'\nmade = types.ModuleType(Made.__module__)\n"
            "made.Made = Made\nsys.modules[Made.__module__] = made\n"
        )
        if place == "pack":
            (folder / place / "__init__.py").touch()
        inner = importlib.import_module(f"{place}.inner")
        assert not goes_by_value(inner.Inner)
        assert not goes_by_value(inner.Made)
        assert arrives_elsewhere(inner.Inner, "obj.__module__") == f"{place}.inner"
        assert arrives_elsewhere(inner.Made, "obj.__module__") == f"{place}.inner.made"


def test_what_a_process_that_has_met_this_one_knows_by_name(by_hand):
    """It is whatever has its name here, importable or not, while that is the same object."""

    class Local:
        pass

    worker = by_hand.Worker
    assert named_here(worker)
    by_hand.Worker = Local
    assert not any(map(named_here, (Local, lambda: 1, worker, by_hand)))


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        (LOCK, "worker"), ([LOCK], "worker"), (lambda: LOCK, "worker"),
        (Indexer(lock=LOCK), "worker.lock"), (Indexer(Indexer({"deep": LOCK})), "worker.data"),
        (Pair(1, LOCK), "worker.right"), (Record({"a": {1: LOCK}}), "worker.value"),
        (Stateful(LOCK), "worker.renamed"),
    ],
)  # fmt: skip
def test_what_cannot_be_pickled_is_named(obj, path):
    """The TypeError names the argument, its attribute, the reason and the remedy."""
    with pytest.raises(TypeError) as caught:
        dump(obj)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "cannot pickle '_thread.lock' object" in message
    assert "Create or open such objects where they are first used" in message
    # Forks and threads share a file position.
    assert message.endswith("not in the training process")
    # There is one sentence, without tracebacks of cseq.
    assert caught.value.__suppress_context__
    said = path.replace("worker", "out_type")
    with pytest.raises(TypeError, match=f"^{said}: .*copy of the out_type"):
        dump(obj, name="out_type")
