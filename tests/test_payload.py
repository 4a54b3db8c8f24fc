"""The user's worker travels to any process: once, uncopied, by value where it has to."""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import os
import pickle
import subprocess
import sys
import threading
import types
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cseq import payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import RunScript

MEGA = 1 << 20


class Indexer:
    """Something with data."""

    def __init__(self, data: Any = None, **more: Any) -> None:
        self.data = data
        self.__dict__.update(more)

    def read(self) -> Any:
        """Return the data."""
        return self.data


class Slotted:
    """Something whose attributes have no dictionary."""

    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Stateful:
    """Something that says itself what of it is pickled."""

    def __init__(self, lock: object) -> None:
        self._lock = lock

    def __getstate__(self) -> dict[str, object]:
        return {"renamed": self._lock}


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclass
class Record:
    """A dataclass."""

    value: Any


def make(*args: object, **options: object) -> Indexer:
    """Make an indexer, as a factory does."""
    return Indexer((args, options))


def travel(obj: object) -> Any:
    """Send an object through a file, as it goes to a worker."""
    file = payload.dump(obj).share()
    return payload.read(file.fd)


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
    """The payload refers to the object's own memory, and its pickle stays small."""
    array = np.arange(MEGA)
    made = payload.dump(Indexer(array, again=array))
    assert len(made.pickle) < 1000
    assert [view.nbytes for view in made.buffers] == [array.nbytes]
    assert np.shares_memory(np.frombuffer(made.buffers[0], np.uint8), array)
    assert array.nbytes < made.nbytes < array.nbytes + 4096


def test_a_large_array_that_is_not_contiguous_is_copied_once() -> None:
    """It goes out of band too."""
    made = payload.dump(Indexer(np.zeros((1024, 1024))[:, 1:]))
    assert len(made.pickle) < 1000
    assert [view.nbytes for view in made.buffers] == [1024 * 1023 * 8]


def test_small_buffers_stay_in_the_pickle() -> None:
    """Many tiny arrays do not take a place in the file each."""
    made = payload.dump([np.arange(8) for _ in range(100)])
    assert made.buffers == []
    assert made.nbytes < 20000


def test_what_goes_by_value_keeps_nothing_of_the_caller() -> None:
    """Nothing that the caller holds lives on until the garbage collector comes by."""

    def caller() -> weakref.ref[Indexer]:
        mine = Indexer()
        payload.dump(lambda: 1)  # by value, after the plain pickler has given up
        return weakref.ref(mine)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_load_is_the_inverse_of_dump() -> None:
    """Pickle and buffers alone are enough, in whatever way they travel."""
    made = payload.dump(Indexer(np.arange(MEGA)))
    arrived = payload.load(made.pickle, [bytearray(view) for view in made.buffers])
    assert (arrived.data == np.arange(MEGA)).all()


def test_what_one_reader_writes_no_other_sees() -> None:
    """Readers map the file copy on write, and need its descriptor no longer than `read`."""
    file = payload.dump(Indexer(np.zeros(MEGA))).share()
    first, second = payload.read(file.fd), payload.read(file.fd)
    first.data[:] = 1
    third = payload.read(file.fd)
    assert first.data.sum() == MEGA
    assert not second.data.any()
    assert not third.data.any()


def test_write_fills_a_file_that_is_there(tmp_path: Path) -> None:
    """`write` returns the size that it takes, which is `nbytes`; other processes can read it."""
    made = payload.dump(Indexer(np.arange(MEGA)))
    with (tmp_path / "file").open("w+b") as file:
        size = made.write(file.fileno())
        assert size == made.nbytes == os.fstat(file.fileno()).st_size
        assert (payload.read(file.fileno()).data == np.arange(MEGA)).all()


def test_a_system_without_memory_files_uses_a_nameless_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without memfd_create, and where no room can be reserved, all works the same."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert (travel(Indexer(np.arange(MEGA))).data == np.arange(MEGA)).all()


def test_no_room_is_a_memory_error_that_names_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory is found out while writing; it is no SIGBUS in a worker later."""

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    made = payload.dump(np.zeros(MEGA))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match=str(made.nbytes)):
        made.share()


def test_a_file_system_that_cannot_reserve_is_written_to_nevertheless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reserving is a service, not a condition."""

    def unsupported(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "unsupported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    assert travel([1, 2]) == [1, 2]


@pytest.mark.parametrize("content", [b"x", b"something else" * 9])
def test_a_file_with_something_else_is_an_error(tmp_path: Path, content: bytes) -> None:
    """`read` raises ValueError and does not unpickle what it finds."""
    file = tmp_path / "file"
    file.write_bytes(content)
    with file.open("rb") as opened, pytest.raises(ValueError, match="no payload"):
        payload.read(opened.fileno())


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
    made = payload.dump(Indexer(array))
    assert made.nbytes < 2000
    arrived = travel(Indexer(array)).data
    assert isinstance(arrived, np.memmap)
    assert (arrived == array).all()


def test_a_worker_does_not_write_to_the_trainers_file(mapped: Callable[..., Any]) -> None:
    """A mapping for reading stays one; of one for writing, the worker's changes are its own."""
    assert not travel(mapped("r")).flags.writeable
    arrived = travel(mapped("r+"))
    arrived[:] = 0
    assert mapped("r")[0, 1] == 1


@pytest.mark.parametrize("case", ["private", "columns", "gone", "result"])
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
    assert payload.dump(array).nbytes > array.nbytes
    assert (travel(array) == array).all()


def test_tensors_are_not_copied_into_the_pickle() -> None:
    """A plain CPU tensor goes out of band like an array."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(MEGA)
    made = payload.dump(Indexer(tensor))
    assert len(made.pickle) < 1000
    assert np.shares_memory(np.frombuffer(made.buffers[0], np.uint8), tensor.numpy())
    arrived = travel(Indexer(tensor)).data
    assert torch.equal(arrived, tensor)
    arrived[0] = 5  # its own memory, writable


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
    tensor = change(torch, torch.ones(64))
    arrived = travel(Indexer(tensor)).data
    assert arrived.dtype == tensor.dtype
    assert arrived.requires_grad == tensor.requires_grad
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


# --- by reference and by value -------------------------------------------------------------------


def read_elsewhere(fd: int, expression: str) -> str:
    """Read a payload in a new process, and evaluate an expression of `obj` there."""
    code = f"from cseq import payload\nobj = payload.read({fd})\nprint(({expression}))"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        pass_fds=[fd],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def arrives_elsewhere(obj: object, expression: str) -> str:
    """Send an object to a new process, and evaluate an expression of `obj` there."""
    file = payload.dump(obj).share()
    return read_elsewhere(file.fd, expression)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder on the path; what is imported from it is forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if str(tmp_path) in str(getattr(module, "__file__", tmp_path)):
            del sys.modules[name]


def import_file(path: Path, source: str) -> types.ModuleType:
    """Write a module, and import it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    importlib.invalidate_caches()
    return importlib.import_module(path.stem)


SOURCE = "class Worker:\n    answer = 42\n    def __getitem__(self, i): return helper(i)\n"
SOURCE += "def helper(i): return i + Worker.answer\n"


def test_what_can_be_imported_goes_by_reference(folder: Path) -> None:
    """A module that a new process finds is imported there, not pickled."""
    module = import_file(folder / "on_disk.py", SOURCE)
    made = payload.dump(module.Worker())
    assert not made.by_value
    assert b"helper" not in made.pickle
    assert arrives_elsewhere(module.Worker(), "obj[1], type(obj).__module__") == "(43, 'on_disk')"


def test_plain_workers_need_no_cloudpickle(run_script: RunScript) -> None:
    """It is imported only when something has to go by value."""
    done = run_script(
        "import sys, functools, collections\n"
        "from cseq import payload\n"
        "payload.dump(functools.partial(collections.Counter, [1, 2]))\n"
        "print('cloudpickle' in sys.modules)\n"
        "payload.dump(lambda: 1)\n"
        "print('cloudpickle' in sys.modules)\n"
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_local_classes_and_lambdas_go_by_value() -> None:
    """What is defined inside a function works, with what it refers to."""
    offset = 40

    class Local:
        def __getitem__(self, i: int) -> int:
            return i + offset

    assert arrives_elsewhere(Local, "obj()[2]") == "42"
    assert arrives_elsewhere(lambda: [Local()], "obj()[0][3]") == "43"
    assert arrives_elsewhere({"deep": [functools.partial(Local)]}, "obj['deep'][0]()[4]") == "44"


def test_a_module_made_by_hand_goes_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that exists in memory only is taken along."""
    module = types.ModuleType("made_by_hand")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert payload.dump(vars(module)["Worker"]).by_value
    assert arrives_elsewhere(vars(module)["Worker"](), "obj[1]") == "43"
    assert arrives_elsewhere(functools.partial(vars(module)["helper"], 2), "obj()") == "44"


def test_a_module_whose_file_is_gone_goes_by_value(folder: Path) -> None:
    """What cannot be imported any more is taken along."""
    module = import_file(folder / "vanishing.py", SOURCE)
    (folder / "vanishing.py").unlink()
    assert payload.dump(module.Worker).by_value
    assert arrives_elsewhere(module.Worker(), "obj[1]") == "43"


def test_a_module_that_another_one_hides_goes_by_value(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process would import the other one of the same name."""
    module = import_file(folder / "twin.py", SOURCE)
    (folder / "first").mkdir()
    (folder / "first" / "twin.py").write_text("raise SystemExit('the wrong twin')")
    monkeypatch.syspath_prepend(str(folder / "first"))
    assert payload.dump(module.Worker).by_value
    assert arrives_elsewhere(module.Worker(), "obj[1]") == "43"


def test_a_helper_that_workers_cannot_import_comes_with_what_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modules that a function refers to are looked at too, not only those of classes."""
    module = types.ModuleType("made_by_hand")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert arrives_elsewhere(lambda: module.Worker()[1], "obj()") == "43"


def test_packages_and_their_modules_go_by_reference(folder: Path) -> None:
    """Modules in packages, packages without __init__.py, and what a module makes of itself."""
    (folder / "plain").mkdir()
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("")
    for place in ("plain", "pack"):
        (folder / place / "inner.py").write_text(
            "import sys, types\nclass Inner: pass\nclass Made: pass\n"
            "Made.__module__ = __name__ + '.made'\nmade = types.ModuleType(Made.__module__)\n"
            "made.Made = Made\nsys.modules[Made.__module__] = made\n"
        )
        inner = importlib.import_module(f"{place}.inner")
        assert not payload.dump(inner.Inner).by_value
        assert not payload.dump(inner.Made).by_value
        assert arrives_elsewhere(inner.Inner, "obj.__module__") == f"{place}.inner"
        assert arrives_elsewhere(inner.Made, "obj.__module__") == f"{place}.inner.made"


def test_a_name_that_means_something_else_now_goes_by_value() -> None:
    """A class or function that is not what its module has under its name is taken along."""
    function = types.FunctionType((lambda: 41).__code__, {})
    function.__module__, function.__qualname__ = __name__, "make"
    assert payload.dump(function).by_value
    assert arrives_elsewhere(function, "obj()") == "41"


def test_each_module_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of objects of a class ask the import system once."""
    asked: list[str] = []
    find = payload.find_spec

    def count(name: str, path: Any) -> Any:
        asked.append(name)
        return find(name, path)

    monkeypatch.setattr(payload, "find_spec", count)
    payload.dump([Indexer(make) for _ in range(1000)] + [Slotted(Pair(1, 2))])
    assert len(asked) == len(set(asked))
    assert __name__ in asked


def test_cloudpickles_own_list_of_modules_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What goes by value for us goes by reference for the user's own uses of cloudpickle."""
    cloudpickle = pytest.importorskip("cloudpickle")
    module = types.ModuleType("made_by_hand")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    before = set(cloudpickle.list_registry_pickle_by_value())
    payload.dump(vars(module)["Worker"])
    assert set(cloudpickle.list_registry_pickle_by_value()) == before


SCRIPT = """
import os, subprocess, sys
from dataclasses import dataclass
import numpy as np
from cseq import payload

scale = np.full(4, 10)

@dataclass
class Batch:
    x: object

class Worker:
    def __init__(self, offset): self.offset = offset
    def __getitem__(self, i): return Batch(scale * i + self.offset)

made = payload.dump(Worker(7))
file = made.share()
code = '''
import pickle, sys
from cseq import payload
worker = payload.read(int(sys.argv[1]))
batch = worker[3]
print(batch.x.tolist())
sys.stdout.flush()
sys.stdout.buffer.write(pickle.dumps(batch))
'''
done = subprocess.run(
    [sys.executable, "-c", code, str(file.fd)],
    pass_fds=[file.fd], stdout=subprocess.PIPE, check=True,
)
line, back = done.stdout.split(b"\\n", 1)
print(made.by_value, line.decode(), type(payload.loads(back)) is Batch)
"""


def test_a_script_goes_by_value_and_its_classes_come_back_as_its_own(
    run_script: RunScript,
) -> None:
    """A worker from ``__main__`` works elsewhere, and what it returns is of the script's class."""
    done = run_script(SCRIPT)
    assert done.stdout == "True [37, 37, 37, 37] True\n", done.stderr


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


def test_dumps_goes_by_reference_where_pickle_can() -> None:
    """Between processes that have met, a class is known by its name; loads is the inverse."""
    data = payload.dumps(Record([1, 2]))
    assert data == pickle.dumps(Record([1, 2]), protocol=5)
    assert payload.loads(data) == Record([1, 2])


def test_dumps_takes_local_classes() -> None:
    """What pickle cannot do goes by value, and is the same class where it came from."""

    class LocalError(Exception):
        pass

    error = payload.loads(payload.dumps(LocalError(1, 2)))
    assert type(error) is LocalError
    assert error.args == (1, 2)


def test_dumps_raises_what_pickling_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without cloudpickle."""
    with pytest.raises(TypeError, match="lock"):
        payload.dumps(threading.Lock())
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match="lock"):
        payload.dumps(threading.Lock())


# --- what cannot be pickled ----------------------------------------------------------------------


def refers_to(lock: object) -> Callable[[], object]:
    """Return a function that refers to something."""
    return lambda: lock


def has_default(lock: object) -> Callable[[], object]:
    """Return a function with a default argument."""

    def function(_: object = lock) -> None:
        pass

    return function


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
        (Indexer([Indexer(), Indexer(Pair(1, LOCK))]).data, "worker[1].data[1]"),
        (Slotted(Slotted(LOCK)), "worker.inner.inner"),
        (Record({"a": {1: LOCK}}), "worker.value['a'][1]"),
        (Stateful(LOCK), "worker.renamed"),
        (Indexer(np.array([None, LOCK], dtype=object)), "worker.data.flat[1]"),
        (Indexer({LOCK}), "worker.data{"),
        (Indexer(LOCK).read, "worker.__self__.data"),
        (refers_to(Indexer(LOCK)), "worker variable 'lock'.data"),
        (has_default(LOCK), "worker.__defaults__[0]"),
        (has_attribute(LOCK), "worker.shared"),
        (Indexer(has_attribute([LOCK])), "worker.data.shared[0]"),
    ],
)
def test_what_cannot_be_pickled_is_named(obj: object, path: str) -> None:
    """The TypeError names the argument, the path to the culprit, why, and what to do."""
    with pytest.raises(TypeError) as caught:
        payload.dump(obj)
    message = str(caught.value)
    assert message.startswith(f"{path}: " if path[-1] != "{" else path)
    assert "cannot pickle '_thread.lock' object" in message
    assert "__init__" in message
    assert "thread_type='thread'" in message
    assert caught.value.__cause__ is not None


def test_the_argument_has_its_own_name() -> None:
    """`name` is what messages call the object."""
    with pytest.raises(TypeError, match=r"^out_type\.lock: .*copy of the out_type"):
        payload.dump(Indexer(lock=LOCK), name="out_type")


def test_a_global_that_cannot_be_pickled_is_named(run_script: RunScript) -> None:
    """A script's function takes its global names along; the message says which one."""
    done = run_script(
        "import threading\nfrom cseq import payload\nlock = threading.Lock()\n"
        "class Worker:\n    def __getitem__(self, i): return lock\n"
        "try:\n    payload.dump(Worker)\nexcept TypeError as error:\n    print(error)"
    )
    assert done.stdout.startswith("worker.__getitem__ global 'lock': cannot pickle"), done.stderr


def test_a_way_back_is_no_culprit() -> None:
    """Objects that refer to each other do not hide which of them is to blame."""
    parent, child = Indexer(), Indexer()
    parent.data, child.data = child, parent
    parent.__dict__["late"] = {"lock": LOCK}
    with pytest.raises(TypeError, match=r"^worker\.late\['lock'\]: "):
        payload.dump(parent)


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep and wide an object is, the search gives up, and the error is raised."""
    monkeypatch.setattr(payload, "MOST_PROBES", 10)
    with pytest.raises(TypeError, match=r"^worker: cannot pickle"):
        payload.dump([*range(100), LOCK])
    monkeypatch.setattr(payload, "MOST_PROBES", 10**6)
    monkeypatch.setattr(payload, "MOST_LEVELS", 3)
    with pytest.raises(TypeError, match=r"^worker\[0\]\[0\]\[0\]: cannot pickle"):
        payload.dump([[[[[LOCK]]]]])


def test_an_object_whose_own_pickling_fails_is_named() -> None:
    """What a class itself raises is in the message, under the path of its object."""

    class Stubborn:
        def __reduce__(self) -> str:
            raise RuntimeError("not for travel")

    with pytest.raises(TypeError, match=r"^worker\.data: not for travel"):
        payload.dump(Indexer(Stubborn()))


def test_without_cloudpickle_the_error_says_what_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What needs it is named; what is to blame anyway is named as ever."""
    payload.by_value_pickler.cache_clear()
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    class Local:
        pass

    with pytest.raises(TypeError, match=r"worker: .*Local .*pip install cloudpickle"):
        payload.dump(Local)
    with pytest.raises(TypeError, match=r"^worker\.data\.lock: cannot pickle '_thread.lock'"):
        payload.dump(Indexer(Indexer(lock=LOCK)))
