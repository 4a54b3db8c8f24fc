"""Objects that travel to new processes, for tests of pickling."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from cseq._memory import Mapping
from cseq.encoding import codec
from cseq.encoding._codec import TicketWriter
from cseq.encoding.pickling import dump
from cseq.memory.descriptors import sparse_file

WIDTH = 1 << 30


class Indexer:
    def __init__(self, data=None, **more):
        self.data = data
        self.__dict__.update(more)


class Stateful:
    """An object that defines its pickled state."""

    def __init__(self, lock):
        self._lock = lock

    def __getstate__(self):
        return {"renamed": self._lock}


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    value: Any


def write_batch(obj):
    """Write an object to a file, as a supervisor does."""
    file = sparse_file(WIDTH)
    writer = TicketWriter(file.fd, WIDTH)
    writer.room.select(0, 0)
    record = codec.encode_pickled(dump(obj), writer.encoder)
    writer.room.close()
    return file, record


def read(file, record):
    """Read an object, as a worker does."""
    return codec.decode(Mapping(file.fd, 0, sum(record), own=True), record)


def travel(obj):
    """Send an object through a file, as it travels to a worker."""
    return read(*write_batch(obj))


def nbytes(obj):
    """Return the number of bytes that travel for an object."""
    made = dump(obj)
    return len(made.data) + sum(view.nbytes for view in made.buffers)


def goes_by_value(obj):
    """Return whether reading the object requires cloudpickle."""
    return b"cloudpickle" in dump(obj).data


def arrives_elsewhere(obj, expression):
    """Send an object to a new process, and evaluate an expression of `obj` there."""
    file, record = write_batch(obj)
    written = bytes(Mapping(file.fd, 0, sum(record)))
    code = (
        "import sys\nfrom cseq._memory import Block\nfrom cseq.encoding import codec\n"
        "data = sys.stdin.buffer.read()\n"
        "memory = Block(len(data))\nmemoryview(memory)[:] = data\n"
        f"obj = codec.decode(memory, {record})\n"
        f"print(({expression}))"
    )
    there = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, env=there, input=written).decode().strip()
