"""One worker process: its messages to the trainer, and the trainer's to it."""

import logging
import pickle
import socket
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from refusing import refusing
from waiting import together

from cseq.processes import logs
from cseq.processes import worker as process
from cseq.processes.worker import FAILED, HEADER, LOGGED, READY, WorkerProcess, send_state

SETUP = process.Setup(0, 1, (0, 8), 8, 0, "x" * 10**6, None)


@pytest.fixture
def ends():
    """Return a worker without a process, and the process's end of the socket."""
    ours, theirs = socket.socketpair()
    # On Windows, the handle of the other process is this one's.
    winapi = sys.modules.get("_winapi")
    child = SimpleNamespace(sock=ours, handle=winapi and winapi.GetCurrentProcess())
    worker = WorkerProcess(1, child)
    with theirs:
        yield worker, theirs
        worker.close()


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_messages_arrive_in_any_pieces(ends, size):
    """They may be split anywhere, and contain the bytes of another message."""
    worker, theirs = ends
    body = b"why\0\0E" * 3
    for last, told in ((READY, b""), (FAILED, body)):
        noted = HEADER.pack(process.NOTED, 4) + b"look"
        sent = HEADER.pack(process.ENTERED, 0) + HEADER.pack(process.LOADED, 0)
        sent += HEADER.pack(last, len(told)) + told + noted
        messages = []
        for k in range(0, len(sent), size):
            theirs.sendall(sent[k : k + size])
            messages += worker.receive() or []
        failed = [(FAILED, body)] if last == FAILED else []
        assert messages == [*failed, (process.NOTED, b"look")]
        assert worker.state == last
        assert worker.entered > 0


def test_messages_are_sent_whole(ends):
    """Threads send them, and a signal handler may in the middle of one: its message comes after."""
    worker, theirs = ends

    class Halves:
        """Sends in two parts; in between, a handler sends its own message."""

        nested = False

        def sendall(self, data):
            theirs.sendall(data[:5])
            if not self.nested:
                self.nested = True
                send_state(sock, LOGGED, b"handler's")
            theirs.sendall(data[5:])

    sock = Halves()
    together(*(partial(send_state, sock, LOGGED, b"%d" % k) for k in range(8)))
    send_state(sock, READY)
    bodies = []
    # They need not all come at once.
    while worker.state != READY:
        messages = worker.receive()
        bodies += [body for _, body in messages]
    assert bodies[1] == b"handler's"
    assert sorted(bodies[:1] + bodies[2:]) == [b"%d" % k for k in range(8)]


def test_more_records_than_handlers_take(monkeypatch, caplog):
    """The queue is bounded; the log says what is left out."""
    calls, texts = [], []
    monkeypatch.setattr(logs, "MOST", 3)
    monkeypatch.setattr(logs, "call_later", calls.append)
    monkeypatch.setattr(logs.log, "handle", lambda record: texts.append(record.getMessage()))
    caplog.set_level(logging.INFO, "cseq")
    records = logs.Records()

    def queue(text):
        records.queue_record(pickle.dumps({"name": "cseq", "levelno": logging.INFO, "msg": text}))

    for k in range(5):
        queue(str(k))
    for _ in range(2):
        for call in calls:
            call()
        calls.clear()
        queue("later")
    assert texts[0].startswith("2 log records from the workers were dropped")
    assert texts[1:] == ["0", "1", "2", "later"]


@pytest.mark.needs("POSIX")
@pytest.mark.parametrize("error", [ConnectionResetError, ConnectionAbortedError, BrokenPipeError])
def test_however_a_connection_ends(error, ends, monkeypatch):
    """It ends that worker, and nothing else, as when Windows ends it with a killed process."""
    worker, _ = ends
    refuse = refusing(error)
    monkeypatch.setattr("socket.send_fds", refuse)
    with worker.child.sock:
        worker.child.sock = SimpleNamespace(
            recv=refuse, sendall=refuse, sendmsg=refuse, fileno=lambda: -1, close=lambda: None
        )
    worker.handshake(SETUP, 3, 4, 5)
    assert worker.receive() is None


BETWEEN = """
import faulthandler, os, socket, sys, threading, time
import cseq, cseq.processes.worker
class Slow:
    def __init__(self):
        # Ready only when it has been asked for its stacks in the middle of a message.
        class Halves:
            def __init__(self, sock):
                self.sock = sock
            def sendall(self, data):
                half = len(data) // 2
                self.sock.sendall(data[:half])
                for _ in range(5):
                    os.kill(os.getpid(), cseq.processes.worker.STACK_SIGNAL)
                self.sock.sendall(data[half:])
        send = cseq.processes.worker.send_state
        def in_halves(sock, state, body=b""):
            send(Halves(sock), state, body)
        import cseq.engine.worker as process
        process.send_state = in_halves
    def __getitem__(self, indices):
        return indices
class Bad(Slow):
    def __init__(self):
        super().__init__()
        raise ValueError("bad " * 100_000)
with cseq.MPSequence(Slow, 8, 2, batch_size=2, out_type="null", seed=1).start() as batches:
    print(sorted(i for batch in batches for i in batch.tolist()))
try:
    with cseq.MPSequence(Bad, 8, 1, out_type="null").start() as batches:
        list(batches)
except ValueError as error:
    print(len(error.args[0]))
"""


@pytest.mark.skipif(process.STACK_SIGNAL is None, reason="no stacks here")
def test_stacks_in_the_middle_of_a_message(run_script):
    """Stacks written while a worker sends a message leave the message whole."""
    done = run_script(BETWEEN)
    assert done.stdout.split("\n")[:2] == [str(list(range(8))), "400000"], done.stderr
