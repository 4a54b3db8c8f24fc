"""Descriptors: anonymous files on every kernel, and programs that inherit none from cseq."""

import errno
import os
import socket

import pytest
from forking import in_child

from cseq.memory import descriptors
from cseq.processes.launcher import start_methods

linux = pytest.mark.needs("Linux")


@linux
@pytest.mark.parametrize("refusal", [errno.EACCES, errno.EINVAL, errno.ENOSYS])
def test_a_system_that_refuses_them(monkeypatch, refusal):
    """An unnamed temporary file replaces them; other errors are raised."""

    def refuse(*_):
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "memfd_create", refuse)
    file, sealable = descriptors.anonymous_file("cseq-test")
    assert not sealable
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{file.fd}")
    assert not os.get_inheritable(file.fd)
    refusal = errno.EMFILE
    with pytest.raises(OSError, match="Too many open files"):
        descriptors.anonymous_file("cseq-test")


@linux
@pytest.mark.parametrize("mode", ["rb", "r+b"])
def test_a_forked_process_has_an_offset_of_its_own_in_what_it_reads(tmp_path, mode):
    """It starts at the old offset, even in a deleted file. Files open for writing share one."""
    path = tmp_path / "read"
    path.write_bytes(bytes(range(100)))
    with path.open(mode, buffering=0) as file:
        path.unlink()
        file.seek(20)

        def reads():
            descriptors.own_offsets()
            return file.read(10) == bytes(range(20, 30)) and not os.get_inheritable(file.fileno())

        assert in_child(reads)
        assert file.tell() == (20 if mode == "rb" else 30)


@linux
def test_own_offsets_leave_no_descriptor(tmp_path):
    """Each file keeps its number, and one that cannot be reopened is unchanged."""
    (tmp_path / "read").write_bytes(b"text")
    reader, writer = os.pipe()
    path_only = os.open(tmp_path, os.O_PATH)
    with (tmp_path / "read").open() as file:
        before = os.listdir("/proc/self/fd")
        descriptors.own_offsets()
        assert os.listdir("/proc/self/fd") == before
        assert file.read() == "text"
    os.write(writer, b"1")
    assert os.read(reader, 1) == b"1"
    for fd in (reader, writer, path_only):
        os.close(fd)


@pytest.mark.needs("POSIX")
@pytest.mark.parametrize("atomic", [True, False])
def test_what_is_received_is_closed_in_programs(monkeypatch, *, atomic):
    """It holds with and without MSG_CMSG_CLOEXEC."""
    if not atomic:
        monkeypatch.delattr(socket, "MSG_CMSG_CLOEXEC", raising=False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"two"], [0, 1])
        data, fds = descriptors.receive(theirs, 9, 2)
        inheritable = [os.get_inheritable(fd) for fd in fds]
        for fd in fds:
            os.close(fd)
        assert (data, inheritable) == (b"two", [False, False])
        ours.close()
        assert descriptors.receive(theirs, 9, 2) == (b"", [])


# The descriptors open in an executed program if none is closed: the content of /proc/self/fd.
LISTING = '''
import os, subprocess, sys
SHOW = """
import os
for name in os.listdir("/proc/self/fd"):
    if int(name) > 2 and os.path.islink("/proc/self/fd/" + name):
        print(os.readlink("/proc/self/fd/" + name), end="|")
"""

def listed(how):
    command = [sys.executable, "-S", "-c", SHOW]
    if how == "popen":
        text = subprocess.run(command, close_fds=False, stdout=subprocess.PIPE, text=True).stdout
    else:
        read, write = os.pipe()
        if how == "spawn":
            actions = [(os.POSIX_SPAWN_DUP2, write, 1)]
            pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
        else:
            pid = os.fork()
            if pid == 0:
                os.dup2(write, 1)
                os.execv(command[0], command)
        os.close(write)
        os.waitpid(pid, 0)
        text = os.read(read, 65536).decode()
        os.close(read)
    return [what for what in text.strip().split("|") if what and not what.startswith("/proc/")]
'''

INHERIT_JOB = """
import sys, threading
import cseq

class Lister:
    def __getitem__(self, indices):
        return [listed(how) for how in ("popen", "spawn", "exec")]

manager = cseq.MPSequence(Lister, 2, 2, batch_size=1, out_type="null", start_method=sys.argv[1])
over, seen = threading.Event(), []
def during():
    while not over.is_set():
        seen.append(listed("popen"))
watcher = threading.Thread(target=during)
watcher.start()
with manager.start() as batches:
    found = [*batches, Lister()[None]]
over.set()
watcher.join()
print(sum(found, []) == [[]] * 9, [w for w in seen if w], found)
"""


@linux
@pytest.mark.parametrize("method", start_methods())
def test_executed_programs_inherit_nothing(run_script, method):
    """They inherit none from an indexer or from the trainer, at any time of a start."""
    done = run_script(LISTING + INHERIT_JOB, method)
    assert done.stdout.startswith("True []"), done.stdout + done.stderr


CLOSED_JOB = """
import contextlib, os, sys, time
log = os.dup2(1, 60)
for fd in map(int, sys.argv[2]):
    os.close(fd)

def present():
    found = []
    for fd in sys.argv[2]:
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found

def opened():
    # What has such a number and keeps it. The system gives a new descriptor the lowest free one,
    # which another thread lifts; subprocess's own pipe has it until a spawned program has begun.
    found, end = present(), time.monotonic() + 0.5
    while found and time.monotonic() < end:
        still = present()
        found = [link for link in found if link in still and not link.startswith("pipe:")]
    return found

import numpy as np, cseq
from cseq import testing

class Indexer:
    def __getitem__(self, indices):
        streams = [os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, sys.argv[2])]
        assert all(stream == "/dev/null" for stream in streams), streams
        return np.repeat(indices, 5000)

method, seen = sys.argv[1], []
manager = cseq.MPSequence(
    Indexer, 60, 2, batch_size=1, out_type="null", start_method=method, shuffle=False
)
with manager.start() as batches:
    for number, batch in enumerate(batches):
        assert (batch == number).all()
        seen += opened()
        if number == 20:
            testing.await_workers(manager)
            testing.kill(manager, 0)
os.write(log, f"{number} {seen} {opened()}".encode())
"""


@linux
@pytest.mark.parametrize("closed", ["12", "012"])
@pytest.mark.parametrize("method", start_methods())
def test_no_descriptor_stands_in_for_a_closed_standard_stream(run_script, method, closed):
    """In a daemon, neither shared memory nor a socket does, even after a worker was replaced."""
    done = run_script(CLOSED_JOB, method, closed)
    assert done.stdout == "59 [] []", done.stdout + done.stderr


NULL_JOB = """
import os, sys, cseq
import numpy as np
class Indexer:
    def __getitem__(self, indices):
        os.write(2, b"") if sys.argv[2] == "open" else None
        return np.array([os.read(0, 9) == b""])
method, streams = sys.argv[1:]
if streams == "closed":
    os.close(0), os.close(2)
with cseq.MPSequence(Indexer, 4, 2, out_type="null", start_method=method).start() as batches:
    print(np.concatenate(list(batches)).all())
"""


@linux
@pytest.mark.parametrize("streams", ["open", "closed"])
@pytest.mark.parametrize("method", start_methods())
def test_a_system_without_a_null_device(run_anew, tmp_path, method, streams):
    """The workers' standard input is still empty."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.devnull = '/nowhere/null'")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_anew(NULL_JOB, method, streams, PYTHONPATH=path)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.needs("POSIX")
def test_what_is_received_is_above_the_standard_streams(run_script):
    """It holds even if all of these are closed; the low numbers are free again."""
    done = run_script("""
import os, socket
from cseq.measure import lanes
from cseq.memory import descriptors
log = os.dup2(1, 60)
ours, theirs = socket.socketpair()
for fd in range(3):
    os.close(fd)
socket.send_fds(ours, [b"x"], [log, log])
fds = descriptors.receive(theirs, 9, 2)[1]
low = socket.socket()
new = descriptors.lifted(low)
fds += [descriptors.anonymous_file("cseq-test")[0].fd, new.fileno()]
os.write(log, str([min(fds) > 2, low.fileno(), descriptors.lifted(new) is new]).encode())
""")
    assert done.stdout == "[True, -1, True]", done.stderr
