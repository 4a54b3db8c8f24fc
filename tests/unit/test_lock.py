"""The lock of a run: one thread at a time, reentrant; signals, forks and deferred calls."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from forking import in_child
from interrupting import is_mine

from cseq._lock import Lock


@contextmanager
def taken_elsewhere(lock):
    """Make another thread hold the lock; it releases the lock once the event is set."""
    has, leave = threading.Event(), threading.Event()

    def hold():
        with lock.hold():
            has.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait()
    try:
        yield leave
    finally:
        leave.set()
        thread.join()


def test_it_is_given_back_as_often_as_taken():
    """Until the last release, its thread has it."""
    lock = Lock()

    def look():
        with lock.hold(timeout=0) as hold:
            return hold.has

    def elsewhere():
        with ThreadPoolExecutor() as pool:
            return pool.submit(look).result()

    assert not is_mine(lock)
    with lock.hold():
        with lock.hold():
            with lock.hold(timeout=0) as hold:
                assert hold.has
                assert not elsewhere()
            assert not elsewhere()
        assert is_mine(lock)
        assert not elsewhere()
    assert not is_mine(lock)
    assert elsewhere()


def test_a_time_limit():
    """The lock is not taken then, and not released at the end of the body."""
    lock = Lock()
    with taken_elsewhere(lock):
        # time.monotonic counts in steps of 16 ms on Windows.
        before = time.perf_counter()
        for _ in range(2):
            with lock.hold(timeout=0.05) as hold:
                assert not hold.has
                assert time.perf_counter() - before >= 0.05
    with lock.hold(timeout=60) as hold:
        assert hold.has


class Struck(BaseException):
    """The signal handler's exception; `Thread.start` takes an Exception for a failed start."""


def strike(*_):
    """Raise when a signal has come, or when a lock has just been taken."""
    raise Struck


@pytest.fixture
def striking():
    """Let SIGUSR1 raise."""
    before = signal.signal(signal.SIGUSR1, strike)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.needs("Linux")
@pytest.mark.usefixtures("striking")
@pytest.mark.parametrize("timeout", [-1, 60])
def test_a_signal_handler_that_raises(timeout):
    """It ends the wait; the lock is not taken."""
    lock = Lock()
    with taken_elsewhere(lock):
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(Struck), lock.hold(timeout=timeout):
            pass
        assert not is_mine(lock)
        timer.join()
    with lock.hold(timeout=60) as hold:
        assert hold.has


def test_an_exception_between_the_taking_and_the_body():
    """From Python 3.14 on, a signal handler may raise there: the lock is released."""
    lock = Lock()
    # Nothing would release the lock.
    assert not hasattr(lock, "__enter__")
    with pytest.raises(Struck):
        # `with` has done this when the handler runs.
        strike(lock.hold().__enter__())
    assert not is_mine(lock)
    with lock.hold():
        with pytest.raises(Struck):
            strike(lock.hold(timeout=60).__enter__())
        assert is_mine(lock)
    assert not is_mine(lock)


def test_calls_that_are_put_off():
    """They are made once the lock is free: by the thread that had it, or here if none had it."""
    lock, made = Lock(), []

    def call():
        made.append((threading.get_ident(), lock.is_mine))

    here = (threading.get_ident(), False)
    lock.put_off(call)
    assert made == [here]
    with lock.hold():
        with lock.hold():
            lock.put_off(call)
        lock.put_off(call)
        assert len(made) == 1
    assert made == [here] * 3
    with taken_elsewhere(lock):
        lock.put_off(call)
        assert len(made) == 3
    assert len(made) == 4
    assert made[3][0] != here[0]
    with lock.hold():
        pass
    assert len(made) == 4


def test_a_call_that_is_put_off_and_raises():
    """It raises where the lock is released; later calls are made at the next release."""
    lock, made = Lock(), []
    with pytest.raises(Struck), lock.hold():
        lock.put_off(strike)
        lock.put_off(lambda: made.append(1))
    assert (made, lock.is_mine) == ([], False)
    with lock.hold():
        pass
    assert made == [1]


@pytest.mark.needs("Linux")
@pytest.mark.usefixtures("striking")
def test_signals_while_it_is_taken():
    """Wherever a real signal's handler raises, the lock is not left taken."""
    lock, struck = Lock(), 0

    def strike_and_leave(leave):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        leave.set()

    for _ in range(200):
        try:
            with taken_elsewhere(lock) as leave:
                signaller = threading.Thread(target=strike_and_leave, args=(leave,))
                signaller.start()
                with lock.hold():
                    signaller.join()
        except Struck:
            struck += 1
        signaller.join()
        assert not is_mine(lock)
    assert struck == 200


@pytest.mark.needs("fork")
@pytest.mark.parametrize("mine", [True, False])
def test_a_fork(mine):
    """Only the forking thread survives: it keeps its lock, or the lock is free."""
    lock = Lock()

    def is_kept_or_free():
        good = is_mine(lock) == mine
        with lock.hold(timeout=0) as hold:
            good &= hold.has
        if mine:
            held.close()
        return good and not is_mine(lock)

    with ExitStack() as held:
        held.enter_context(lock.hold() if mine else taken_elsewhere(lock))
        assert in_child(is_kept_or_free)


@pytest.mark.needs("fork")
def test_a_fork_whose_thread_has_the_number_of_the_owner():
    """A new thread may reuse the number of a vanished one: the lock is not its own."""
    lock, others, found = Lock(), set(threading.enumerate()), list[bool]()
    with taken_elsewhere(lock):
        (owner,) = set(threading.enumerate()) - others

        def look():
            if threading.get_ident() == owner.ident:
                found.append(is_mine(lock))

        def finds_none():
            for _ in range(100):
                thread = threading.Thread(target=look)
                thread.start()
                thread.join()
            return not any(found)

        assert in_child(finds_none)
