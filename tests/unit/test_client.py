"""`Client`: a process's connections to the process that fetches shards."""

import json
import socket
import threading

import pytest
from s3_server import S3Server
from sharded import npy_shards, s3

from cseq import store
from cseq.store.client import Line

pytest.importorskip("obstore")
pytestmark = pytest.mark.needs("Linux")


def kept():
    """Ask the fetcher of "cache", over another connection, how many shards it has."""
    with socket.socket(socket.AF_UNIX) as line, line.makefile("rb") as answers:
        line.settimeout(60)
        line.connect("cache/socket")
        line.sendall(b'["stats"]\n')
        return json.loads(answers.readline())[0][0]


def test_what_a_thread_fails_to_open_makes_room(tmp_path, monkeypatch):
    """A thread that fails to map the shard that it waited for holds up no other thread."""
    monkeypatch.chdir(tmp_path)
    shards = npy_shards([8, 8])
    limit = max(map(len, shards.values()))
    send, got, asked = Line.send, [], threading.Event()

    def tell(line, data):
        send(line, data)
        if threading.current_thread() is not threading.main_thread():
            asked.set()

    def fail(number, view):
        if number:
            return mapped(number, view)
        other.start()
        assert asked.wait(60)
        # After two answers, what was sent before has been read.
        assert [kept(), kept()] == [1, 1]
        raise OSError("too many open files")

    monkeypatch.setattr(Line, "send", tell)
    with S3Server(shards) as server:
        arrays = store.Npy("train/", store=s3(server), cache="cache", limit=limit)
        other = threading.Thread(target=lambda: got.append(arrays[8][0]), daemon=True)
        mapped = arrays.mapped
        monkeypatch.setattr(arrays, "mapped", fail)
        with pytest.raises(OSError, match="too many open files"):
            arrays[0]
        other.join(60)
    assert got == [8]
