"""Threads and latches work, wherever a signal handler raises."""

import itertools
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from interrupting import interrupted
from refusing import NO_THREAD, refusing
from sharded import written

import cseq
from cseq.threads import Latch, Threads, await_logged, log_later, thread_limits

# Seconds after which an operation that should end counts as hung.
SOON = 30.0


def test_threads_and_a_latch():
    """All run under their names, wait until the latch is set, and have ended after `join`."""
    threads, go = Threads(), Latch()
    seen = []
    for name in ("one", "two"):
        threads.add(name, lambda: seen.append((threading.current_thread().name, go.wait(SOON))))
    assert not threads.begun
    threads.start()
    assert threads.begun
    assert threads.join(time.monotonic()) == ["one", "two"]
    assert not go.wait(0)
    assert not go.wait(0.001)
    go.set()
    go.set()
    assert threads.join(time.monotonic() + SOON) == []
    assert sorted(seen) == [("one", True), ("two", True)]
    assert go.wait()


def test_a_thread_does_not_join_itself():
    """A thread that joins its own `Threads` does not wait for itself; it counts as not ended."""
    threads, left = Threads(), []
    threads.add("one", lambda: left.append(threads.join(time.monotonic() + SOON)))
    threads.start()
    assert threads.join(time.monotonic() + SOON) == []
    assert left == [["one"]]
    assert threads.join(0) == []


@pytest.mark.parametrize("main", [True, False])
def test_a_system_without_any_thread(main, monkeypatch):
    """No thread has begun, so there is nothing to wait for."""
    threads, go = Threads(), Latch()
    threads.add("one", lambda: None)

    def start():
        go.wait()
        with pytest.raises(RuntimeError, match=r"^can't start new thread: the system"):
            threads.start()
        assert not threads.begun
        assert threads.join(time.monotonic() + SOON) == []

    with ThreadPoolExecutor(1) as others:
        other = others.submit(go.wait if main else start)
        with monkeypatch.context() as patch:
            patch.setattr("_thread.start_new_thread", NO_THREAD)
            patch.setattr(threading.Thread, "start", NO_THREAD)
            go.set()
            other.result()
            if main:
                start()


@pytest.mark.parametrize(
    ("library", "name", "patched", "refuses"),
    [
        ("gevent.monkey", "is_module_patched", ["threading", "socket"], ["threads", "processes"]),
        ("gevent.monkey", "is_module_patched", ["socket", "time"], ["processes"]),
        ("gevent.monkey", "is_module_patched", ["time"], []),
        ("eventlet.patcher", "is_monkey_patched", ["thread"], ["threads", "processes"]),
        ("eventlet.patcher", "is_monkey_patched", ["subprocess"], ["processes"]),
    ],
)
def test_patched_modules(monkeypatch, library, name, patched, refuses):
    """If threads are greenlets, or processes need a patched module, an error replaces a hang."""
    module = SimpleNamespace(**{name: patched.__contains__})
    monkeypatch.setitem(sys.modules, library, module)
    makers = {"threads": cseq.MTSequence, "processes": cseq.MPSequence}
    text = f"^{library.partition('.')[0]} has patched {patched[0]!r} in this process"
    for what, make in makers.items():
        manager = make(np.arange(8), num_workers=1, out_type="null", shuffle=False)
        if what in refuses:
            with pytest.raises(RuntimeError, match=text):
                manager.start()
        else:
            with manager.start():
                assert np.concatenate(list(manager)).tolist() == list(range(8))
        with manager.start_test():
            assert np.concatenate(list(manager)).tolist() == list(range(8))
        manager.finish()


def test_the_limits_of_threads(tmp_path):
    """They are the system's own, with numbers, and the remedy."""
    box = "sys/fs/cgroup/box/pids"
    files = {"proc/self/cgroup": b"0::/box\n", f"{box}.max": b"100\n", f"{box}.current": b"99\n"}
    text = thread_limits(written(files, tmp_path))
    assert "pids.max of the control group is 100, with 99 in use" in text
    assert "use fewer workers" in text
    assert "pids.max" not in thread_limits(written({f"{box}.max": b"max\n"}, tmp_path))


def test_ctrl_c_anywhere_in_start_and_join():
    """Wherever a handler raises in `start` or `join`, a second `join` finds all threads ended."""
    for countdown in itertools.count(1):
        threads, go = Threads(), Latch()
        ran = []

        def work(go=go, ran=ran):
            ran.append(go.wait())

        for number in range(2):
            threads.add(f"t{number}", work)
        with interrupted(countdown, anywhere=True) as struck:
            threads.start()
            go.set()
            threads.join(time.monotonic() + SOON)
        go.set()
        assert threads.join(time.monotonic() + SOON) == []
        assert len(ran) == 2 * threads.begun
        if not struck.is_set():
            break
    assert countdown > 10


class Handler(logging.Handler):
    """Records messages and their threads; acts at one of them."""

    def __init__(self, act=lambda: None):
        super().__init__()
        self.act, self.got, self.threads = act, [], set()

    def emit(self, record):
        self.threads.add(threading.get_ident())
        if record.getMessage() == "act":
            self.act()
        self.got.append(record.getMessage())


@pytest.fixture
def handler():
    """Install a handler."""
    added, log = Handler(), logging.getLogger("cseq")
    log.addHandler(added)
    yield added
    await_logged(time.monotonic() + SOON)
    log.removeHandler(added)


def test_messages_are_logged_by_one_thread(handler):
    """They come in order, however many wait for a slow handler; the thread ends after the last."""
    go, acts = Latch(), Latch()

    def act():
        acts.set()
        go.wait()

    handler.act = act
    before = threading.active_count()
    log_later(logging.WARNING, "act")
    acts.wait()
    for k in range(50):
        log_later(logging.WARNING, "message %d", k)
    log_later(logging.DEBUG, "not wanted")
    assert handler.got == []
    assert threading.active_count() == before + 1
    # The slow handler holds nothing up.
    await_logged(time.monotonic())
    go.set()
    await_logged(time.monotonic() + SOON)
    assert handler.got == ["act", *(f"message {k}" for k in range(50))]
    assert len(handler.threads) == 1
    assert threading.active_count() == before


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_handler_of_logging_that_raises(error, handler, capsys):
    """Its exception is printed; later messages come."""
    handler.act = refusing(error, "no answer")
    log_later(logging.WARNING, "act")
    log_later(logging.WARNING, "later")
    await_logged(time.monotonic() + SOON)
    assert handler.got == ["later"]
    assert f"{error.__name__}: no answer" in capsys.readouterr().err


def test_messages_without_a_thread(handler, monkeypatch):
    """They come as soon as there is a thread."""
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", NO_THREAD)
        log_later(logging.WARNING, "first")
    log_later(logging.WARNING, "second")
    await_logged(time.monotonic() + SOON)
    assert handler.got == ["first", "second"]


def test_ctrl_c_anywhere_in_tell(handler):
    """Wherever a handler raises, later messages come, and each message comes at most once."""
    told = []
    for countdown in itertools.count(1):
        with interrupted(countdown, "threads.py") as struck:
            log_later(logging.WARNING, "struck %d", countdown)
        log_later(logging.WARNING, "later %d", countdown)
        await_logged(time.monotonic() + SOON)
        assert handler.got[-1] == f"later {countdown}"
        told.append(f"later {countdown}")
        if not struck.is_set():
            break
    assert [text for text in handler.got if text.startswith("later")] == told
    assert len(set(handler.got)) == len(handler.got)
    assert countdown > 5


def test_an_import_from_within_an_import(run_script, tmp_path):
    """A module may start a manager in its body, though what that imports needs this module."""
    (tmp_path / "training.py").write_text(
        "import numpy as np, cseq\n"
        "data = np.arange(10)\n"
        "with cseq.MTSequence(data, 10, 2, out_type='cpu', seed=1).start() as batches:\n"
        "    total = sum(float(batch.sum()) for batch in batches)\n"
    )
    # torch imports the modules that have registered with it; this one, which comes without its own
    # files, registers a module that is still being imported.
    (tmp_path / "torch.py").write_text(
        "import training\nraise ModuleNotFoundError('no torch here', name='torch')\n"
    )
    done = run_script("import training\nprint(training.total)\n")
    assert done.stdout == "45.0\n", done.stderr
