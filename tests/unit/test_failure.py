"""An exception's way from an indexer to the loop: it keeps its type."""

import bdb
import contextlib
import dataclasses
import functools
import gc
import logging
import re
import signal
import sys
import traceback
import types
import weakref
from pathlib import Path

import pytest
from indexers import Broken, Indices1, Raising
from kinds import FEW, INLINE, QUICKEST, by_name

import cseq
from cseq.encoding import failure

every_kind = pytest.mark.parametrize("kind", FEW, ids=by_name)


class Coded(Exception):
    """Its constructor does not take its args, and it defines its pickling."""

    def __init__(self, code, *, reason):
        super().__init__(f"code {code}: {reason}")
        self.code = code
        self.reason = reason

    def __reduce__(self):
        return Coded.__new__, (Coded, *self.args), vars(self)


class Formatted(Exception):
    """Its constructor makes the text from one argument."""

    def __init__(self, name):
        super().__init__(f"no file for {name}")
        self.name = name


class Slotted(LookupError):
    """Its args do not have the argument of its constructor."""

    def __init__(self, key):
        super().__init__()
        self.key = key

    def __str__(self):
        return f"no {self.key}"


class Stubborn(Exception):
    def __reduce_ex__(self, protocol):
        raise RuntimeError("stays where it is")


class Changeling(Exception):
    """Its pickle returns another object."""

    def __reduce__(self):
        return (ValueError, ("changed",))


def there_and_back(error):
    """Raise an exception, send it, and receive it."""
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - whatever it is
        return failure.unpack(failure.pack(raised))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="its exception has no text, and no notes")
def test_a_debugger_in_a_worker():
    """It finds no terminal, and quits: the exception says where it works."""
    got = there_and_back(bdb.BdbQuit())
    assert type(got) is bdb.BdbQuit
    [*_, last] = traceback.format_exception_only(got)
    assert "pass num_workers=0, or start a manager with start_test()" in last


PLAIN = [
    lambda: KeyError("key"), lambda: KeyError(5), AssertionError, lambda: OSError("gone"),
    lambda: SystemExit(3), KeyboardInterrupt, lambda: StopIteration(5), GeneratorExit,
    lambda: Coded(7, reason="wet"), lambda: Formatted("maps"), lambda: MemoryError("no room"),
    lambda: cseq.WorkerDied("gone", epoch=1, batch=2, indices=[3], exitcode=-9),
]  # fmt: skip
OWN_TEXTS = [
    lambda: ValueError("text", 3), lambda: OSError(2, "No such file", "name"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), lambda: SyntaxError("bad"),
    lambda: ImportError("none", name="module", path="path"),
]  # fmt: skip
ATTRIBUTES = "errno filename object end lineno name path code reason value"


@pytest.mark.parametrize("make", [*PLAIN, *OWN_TEXTS], ids=lambda make: repr(make()))
def test_arrives_as_itself(make):
    """Type, args, text and attributes arrive, also if the text gets the traceback."""
    sent, got = make(), there_and_back(make())
    assert (got.args, str(got), vars(got)) == (sent.args, str(sent), vars(sent))
    got = failure.show_traceback(failure.show_traceback(got))
    assert type(got) is type(sent)
    assert failure.str_of(got) == str(sent)
    assert vars(got).items() >= vars(sent).items()
    for name in ATTRIBUTES.split():
        assert getattr(got, name, None) == getattr(sent, name, None)
    if make in OWN_TEXTS:
        assert (str(got), got.args) == (str(sent), sent.args)
    else:
        assert f"Caught {type(sent).__name__} in a worker process.\nOriginal Traceback" in str(got)
        assert str(sent) in str(got)
    assert "".join(traceback.format_exception(got)).count("raise error") == 1
    again = there_and_back(got)
    assert (type(again), str(again)) == (type(got), str(got))


def test_what_is_among_its_arguments_arrives_as_itself():
    """The same holds for the exceptions of a group, and for one that is another one's argument."""
    errors = [ValueError("it failed", Formatted("a"))]
    if sys.version_info >= (3, 11):
        errors.append(ExceptionGroup("all", [Formatted("a"), Formatted("b")]))  # noqa: F821
    for sent in errors:
        got = there_and_back(sent)
        assert repr(got.args) == repr(sent.args)
        assert traceback.format_exception_only(got) == traceback.format_exception_only(sent)


def test_what_cannot_be_pickled_is_in_the_text():
    """If an exception cannot be pickled, its type, text and traceback arrive."""
    held = ValueError("text")
    held.handle = (i for i in range(3))  # type: ignore[attr-defined]
    errors = [held, Slotted("key"), Stubborn("text", 1), Changeling("text")]
    errors.append(ValueError((i for i in range(3)), 5))
    if sys.version_info >= (3, 11):
        errors.append(ExceptionGroup("all", [Slotted("key")]))  # noqa: F821
    for error in errors:
        got = there_and_back(error)
        assert type(got) is cseq.WorkerError
        assert f"{type(error).__name__}: {error}" in str(got)
        assert "raise error" in str(got.__cause__)


def test_what_has_no_text_or_a_long_one():
    """If __str__ raises, a WorkerError has the traceback; a text alone is short."""
    sent = Exits("x")
    for got in (there_and_back(sent), failure.unpack(failure.pack_text(sent))):
        assert type(got) is cseq.WorkerError
        assert "Exits: <str() raised SystemExit>" in str(got)
        assert "Exits" in str(got.__cause__)
    packed = failure.pack_text(ValueError("\U0001f600" * 10**5))
    assert len(packed) < 15_000
    got = failure.unpack(packed)
    assert isinstance(got, cseq.WorkerError)
    assert str(got).startswith("ValueError: \U0001f600")


def test_what_only_the_worker_can_import(monkeypatch):
    """An exception that cannot be unpickled here becomes a WorkerError with its text."""
    module = types.ModuleType("theirs")
    exec("class Theirs(ValueError): pass", vars(module))
    monkeypatch.setitem(sys.modules, "theirs", module)
    packed = failure.pack(vars(module)["Theirs"]("the text"))
    monkeypatch.delitem(sys.modules, "theirs")
    got = failure.unpack(packed)
    assert isinstance(got, cseq.WorkerError)
    assert "Theirs: the text" in str(got)
    assert "No module named 'theirs'" in str(got)


def test_the_traceback_comes_along():
    """The received exception's cause is the text of the traceback, with its own causes."""

    def inner():
        raise KeyError("inner")

    try:
        try:
            inner()
        except KeyError as error:
            raise ValueError("outer") from error
    except ValueError as error:
        got = failure.unpack(failure.pack(error))
    assert isinstance(got.__cause__, cseq.RemoteTraceback)
    shown = "".join(traceback.format_exception(got))
    for text in ("in inner", "KeyError: 'inner'", "direct cause", "ValueError: outer"):
        assert text in shown


def test_where():
    """A message names epoch and batch, and the first few indices."""
    assert failure.location_of(1, 2, [3, 4]) == "epoch 1, batch 2, indices [3, 4]"
    text = failure.location_of(0, 0, list(range(100)))
    assert text.endswith("14, 15, … 84 more]")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    path: str


class Exits(Exception):
    """Its pickling, and its text, would end the program."""

    def __reduce__(self):
        sys.exit(3)

    def __str__(self):
        raise SystemExit(3)


class NoCause(Exception):
    @property
    def __cause__(self):
        raise RuntimeError("no cause")


class Notes(Exception):
    __notes__ = 5


class Interrupts(Exception):
    """Its unpickling would end the program."""

    def __reduce__(self):
        return throw, (KeyboardInterrupt,)

    def __str__(self):
        raise KeyboardInterrupt


class Hidden(Exception):
    def __getattribute__(self, name):
        raise RuntimeError("hidden")


class OddText(Exception):
    """Its text is of a class that only the worker has."""

    def __str__(self):
        class Text(str):
            __slots__ = ()

        return Text("odd")


def of_a_parser():
    """Make an exception that `traceback` cannot format: its line is no text."""
    error = SyntaxError("bad")
    error.filename, error.lineno, error.text = "file", 3, 7  # type: ignore[assignment]
    return error


AWKWARD = [
    of_a_parser,
    *(functools.partial(kind, "x") for kind in (Frozen, Exits, NoCause, Notes, OddText)),
]


@pytest.mark.parametrize("make", AWKWARD, ids=lambda make: type(make()).__name__)
@every_kind
def test_awkward_exceptions(kind, make):
    """An exception that cannot be formatted, pickled or annotated is an error of its batch."""
    worker = functools.partial(Raising, make, 5)
    with kind.start(worker, 12, batch_size=2, shuffle=False, on_error="skip") as m:
        assert [b.tolist() for b in m] == [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]
        ((epoch, batch, _, text, _),) = m.skipped
        assert (epoch, batch) == (0, 2)
        assert type(make()).__name__ in text
        assert m.stats().restarts == 0
    expected = (type(make()), cseq.WorkerError)
    batches = kind.start(worker, 12, batch_size=2, shuffle=False)
    with batches as m, pytest.raises(expected) as caught:
        list(m)
    if sys.version_info >= (3, 11):
        notes = vars(caught.value)["__notes__"]
        assert notes == ["cseq: while making epoch 0, batch 2, indices [4, 5]"]
    if kind.processes:
        cause = vars(BaseException)["__cause__"].__get__(caught.value)
        assert "raise self.make()" in cause.args[0]
    stored = failure.Failure()
    stored.note(caught.value)
    for _ in range(2):
        with pytest.raises(expected):
            stored.check()


@every_kind
def test_a_traceback_in_the_loop_has_few_frames_of_ours(kind):
    """It has two frames of the call that gave the batch, then the user's, if its code ran here."""
    worker = functools.partial(Raising, functools.partial(ValueError, "x"), 5)
    batches = kind.start(worker, 12, batch_size=2, shuffle=False)
    with batches as m, pytest.raises(ValueError, match="x") as e:
        list(m)
    files = [Path(frame.filename).name for frame in traceback.extract_tb(e.tb)]
    assert files[0] == "test_failure.py"
    assert files[1:3] == ["_feed.pyx"] * 2
    assert set(files[3:]) <= {"indexers.py"}
    if kind.processes:
        # The text of the worker's traceback begins in the user's code.
        files = re.findall('File "(.*?)", line', str(e.value.__cause__))
        assert Path(files[0]).name == "indexers.py"
        assert not [name for name in files if "cseq" in Path(name).parts[:-1] and "_work" in name]


def test_the_traceback_of_an_error_of_ours():
    """It has all of its frames."""
    with pytest.raises(TypeError) as ours:
        cseq.permutation(3, seed="one")  # type: ignore[arg-type]
    own = failure.unpack(failure.pack(ours.value.with_traceback(ours.tb.tb_next)))
    assert "cseq/" in str(own.__cause__)


@pytest.mark.parametrize("cls", [Interrupts, Hidden], ids=lambda cls: cls.__name__)
def test_an_exception_that_resists_arrives_as_text(cls):
    """Its worker continues, and the batch can be skipped."""
    worker = functools.partial(Raising, functools.partial(cls, "x"), 5)
    with QUICKEST.start(worker, 12, batch_size=2, shuffle=False, on_error="skip") as m:
        assert [b.tolist() for b in m] == [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]
        assert m.stats().restarts == 0
    with QUICKEST.start(worker, 12, batch_size=2, shuffle=False) as m:
        with pytest.raises(cseq.WorkerError, match=f"{cls.__name__}: .*could not be pickled") as e:
            list(m)
        assert "raise self.make()" in str(e.value.__cause__)


ENDINGS = [
    StopIteration, lambda: SystemExit(0), KeyboardInterrupt, GeneratorExit,
]  # fmt: skip


@pytest.mark.parametrize("make", ENDINGS, ids=lambda make: type(make()).__name__)
@every_kind
def test_what_would_end_the_loop(kind, make):
    """StopIteration, `sys.exit` and the like in an indexer are errors of their batch."""
    name = type(make()).__name__
    worker = functools.partial(Raising, make, 5)
    with kind.start(worker, 12, batch_size=2, shuffle=False) as m:
        with pytest.raises(RuntimeError, match=f"the worker raised {name}") as caught:
            list(m)
        assert isinstance(caught.value.__cause__, (type(make()), cseq.RemoteTraceback))
        shown = "".join(traceback.format_exception(caught.value))
        assert "raise self.make()" in shown
        if sys.version_info >= (3, 11):
            assert "epoch 0, batch 2, indices [4, 5]" in shown
    with kind.start(worker, 12, batch_size=2, shuffle=False, on_error="skip") as m:
        assert [b.tolist() for b in m] == [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]
        ((epoch, batch, _, text, _),) = m.skipped
        assert (epoch, batch) == (0, 2)
        assert text.startswith(f"RuntimeError: the worker raised {name}")


class Ending:
    """Ends the program where it is unpickled."""

    def __init__(self, make):
        self.make = make

    def __reduce__(self):
        return throw, (self.make,)


def throw(make):
    """Raise an exception."""
    raise make()


class HasEnding:
    def __init__(self, make):
        self.make = make

    def __getitem__(self, indices):
        return [indices, Ending(self.make) if 5 in indices else None]


@pytest.mark.parametrize("make", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_object_that_ends_the_program(make):
    """An exception of a batch's unpickling is an error of that batch, once, in the trainer, too."""
    worker = functools.partial(HasEnding, make)
    options = {"batch_size": 2, "shuffle": False, "out_type": "null"}
    with cseq.MPSequence(worker, 12, **options).start() as m:
        iterator = iter(m)
        got = [next(iterator)[0][0], next(iterator)[0][0]]
        with pytest.raises(RuntimeError, match=f"the worker raised {make.__name__}"):
            next(iterator)
        assert [*got, *(batch[0][0] for batch in iterator)] == [0, 2, 6, 8, 10]
    with cseq.MPSequence(worker, 12, **options, on_error="skip").start() as m:
        assert [batch[0][0] for batch in m] == [0, 2, 6, 8, 10]


@every_kind
def test_exits_of_other_code_of_the_user(kind, caplog, capfd):
    """`sys.exit` in a callable out_type is an error of the batch; in `close`, it is logged."""

    def leave(array):
        sys.exit(0)

    told = pytest.raises(RuntimeError, match="the worker raised SystemExit: 0")
    with kind.start(Indices1, 4, out_type=leave) as m, told:
        list(m)

    class Leaves(Indices1):
        def close(self):
            sys.exit(7)

    with kind.start(Leaves, 4, num_workers=1) as m:
        assert len(list(m)) == 1
    assert "code 7" in caplog.text if kind.processes else "SystemExit: 7" in caplog.text
    # The records refer to frames of the worker's thread, and so to its ring.
    caplog.clear()


@pytest.mark.parametrize("where", ["indexer", "constructor", "out_type", "close"])
def test_a_signal_handler_that_exits(where):
    """In test mode, a handler's `sys.exit` (for SIGTERM) ends the program: no batch is skipped."""

    class Handler:
        def __call__(self, number, frame):
            sys.exit(5)

    def terminated(at):
        if at == where:
            signal.raise_signal(signal.SIGTERM)

    class Terminated:
        def __init__(self):
            terminated("constructor")

        def __getitem__(self, indices):
            terminated("indexer")
            return indices

        def close(self):
            terminated("close")

    def convert(array):
        terminated("out_type")
        return array

    start = functools.partial(INLINE.start, Terminated, 4, out_type=convert, on_error="skip")
    left = signal.signal(signal.SIGTERM, Handler())
    try:
        for handler in (Handler(), lambda *_: sys.exit(5), functools.partial(Handler.__call__, 0)):
            signal.signal(signal.SIGTERM, handler)
            with pytest.raises(SystemExit) as caught, start() as m:
                list(m)
            assert caught.value.code == 5
    finally:
        signal.signal(signal.SIGTERM, left)


@every_kind
def test_a_failed_manager_is_dropped(kind):
    """Its workers keep the error to raise, but no caller's frames, and they end."""
    manager = kind.start(Broken, 4) if kind.parallel else kind.make(Broken, 4)
    told = []
    for _ in range(3):
        try:
            list(kind.begin(manager))
        except LookupError as error:
            told.append(error.args)
    assert told == [("no such data set",)] * 3
    gone = weakref.ref(manager)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(LookupError):
            list(kind.begin(manager))
        del manager
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "error",
    [Coded(8, reason="stuck"), OSError(2, "no such file", "x.bin"), KeyError("k"),
     UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_a_failure_is_raised_again_and_again(error):
    """Type, attributes and cause stay; additions to one exception do not reach the next one."""
    stored = failure.Failure()
    stored.check()
    assert not stored
    error.__cause__ = cause = ValueError("cause")
    stored.note(error)
    stored.note(RuntimeError("a later one"))
    assert stored
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            stored.check()
        assert str(caught.value) == str(error)
        assert vars(caught.value).get("code") == vars(error).get("code")
        assert caught.value.__cause__ is cause
        assert len(traceback.extract_tb(caught.value.__traceback__)) == 2
        if hasattr(caught.value, "add_note"):
            assert not hasattr(caught.value, "__notes__")
            caught.value.add_note("noted")


@every_kind
def test_a_close_that_raises(kind, caplog, capfd):
    """`finish` returns even if an indexer's close() raises; the log reports it."""

    class Sticky:
        def __getitem__(self, indices):
            return indices

        def close(self):
            raise Coded(8, reason="stuck")

    # A process closes its copy of the object; this process would leave that to the user.
    manager = kind.start(Sticky() if kind.processes else Sticky, 4, num_workers=1)
    list(manager)
    manager.finish()
    printed = capfd.readouterr().err
    assert "code 8: stuck" in caplog.text + printed
    if kind.processes:
        assert re.search(r"worker 0 \(process \d+\) raised an exception:\r?\nTraceback", printed)
    [record] = caplog.records
    # Of a process, it is the exit code.
    level = logging.WARNING if kind.processes else logging.ERROR
    assert (record.levelno, record.name) == (level, "cseq")
    list(kind.begin(manager))
    manager.finish()
    # The records refer to frames of the worker's thread, and so to its ring.
    caplog.clear()
