"""The tests' S3 server: S3's clients accept it, and it fails on command."""

from __future__ import annotations

import http.client
import os
import socket
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from s3_server import S3Server

DATA = bytes(range(256)) * 400
HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")


@pytest.fixture
def server():
    """Return a server with three objects."""
    with S3Server({"a/0.bin": DATA, "a/1.bin": b"one", "b & c.txt": b""}) as running:
        yield running


def ask(server, key, method="GET", timeout=10, **headers):
    """Send one request; return status, headers and body."""
    request = Request(f"{server.endpoint}/any/{key}", method=method, headers=headers)
    try:
        with urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.headers, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.mark.parametrize(
    ("span", "status", "first", "stop"),
    [
        ("bytes=0-9", 206, 0, 10),
        ("bytes=100-", 206, 100, len(DATA)),
        ("bytes=-7", 206, len(DATA) - 7, len(DATA)),
        (f"bytes=5-{10 * len(DATA)}", 206, 5, len(DATA)),
        (f"bytes=-{10 * len(DATA)}", 206, 0, len(DATA)),
        (f"bytes={len(DATA)}-", 416, 0, 0),
    ],
)
def test_ranges(server, span, status, first, stop):
    """A range is answered with its bytes and their position."""
    code, headers, body = ask(server, "a/0.bin", Range=span)
    assert code == status
    if status == 206:
        assert body == DATA[first:stop]
        assert headers["Content-Range"] == f"bytes {first}-{stop - 1}/{len(DATA)}"
    assert [seen.span for seen in server.log("a/0.bin")] == [span]


def test_head_and_etag(server):
    """HEAD has only the size; the ETag changes with the object, and If-Match requires it."""
    status, headers, body = ask(server, "a/0.bin", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(DATA)), b"")
    etag = headers["ETag"]
    assert ask(server, "a/0.bin", **{"If-Match": etag})[2] == DATA
    server.put("a/0.bin", DATA[::-1])
    assert ask(server, "a/0.bin", **{"If-Match": etag})[0] == 412
    status, headers, body = ask(server, "a/0.bin")
    assert (status, body, headers["ETag"] == etag) == (200, DATA[::-1], False)
    server.remove("a/0.bin")
    assert ask(server, "a/0.bin")[0] == 404


def test_log(server):
    """The log has all requests, each with its key and its outcome."""
    ask(server, "a/0.bin", Range="bytes=0-9")
    ask(server, "a/1.bin", "HEAD")
    ask(server, "none")
    seen = [(one.method, one.key, one.status, one.sent) for one in server.log()]
    expected = [("GET", "a/0.bin", 206, 10), ("HEAD", "a/1.bin", 200, 0)]
    assert seen[:2] == expected
    assert seen[2][:3] == ("GET", "none", 404)
    assert server.count("a/*") == 1
    assert server.count("a/*", "*") == 2
    server.forget()
    assert server.log() == []


def test_folder(tmp_path):
    """The files of a folder are objects; a rewritten file has another ETag."""
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "0.bin"
    path.write_bytes(DATA)
    with S3Server(tmp_path) as server:
        status, headers, body = ask(server, "a/0.bin", Range="bytes=-3")
        assert (status, body) == (206, DATA[-3:])
        path.write_bytes(DATA)
        os.utime(path, (1, 1))
        assert ask(server, "a/0.bin")[1]["ETag"] != headers["ETag"]
        assert ask(server, "a")[0] == 404


def test_status(server):
    """A status comes as often as requested, with the wait that it asks for."""
    server.fail("503", key="a/*", after=1, times=2, retry_after=3)
    answers = [ask(server, "a/0.bin") for _ in range(4)]
    assert [status for status, _, _ in answers] == [200, 503, 503, 200]
    assert answers[1][1]["Retry-After"] == "3"
    assert ask(server, "b%20%26%20c.txt")[0] == 200
    server.heal()
    server.fail("403", method="HEAD")
    assert (ask(server, "a/1.bin")[0], ask(server, "a/1.bin", "HEAD")[0]) == (200, 403)
    with pytest.raises(ValueError, match="kind='slowly' is neither a status nor one of"):
        server.fail("slowly")
    with pytest.raises(TypeError, match="no option of a fault: share"):
        server.fail("503", share=0.5)


def test_broken_bodies(server):
    """A cut body is an error of the connection; a short one is an end."""
    server.fail("refuse", times=1)
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask(server, "a/0.bin")
    server.heal()
    server.fail("cut", times=1)
    with pytest.raises((ConnectionError, http.client.IncompleteRead)):
        ask(server, "a/0.bin")
    server.heal()
    server.fail("half", times=1, at=0.25)
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(server, "a/0.bin")
    assert caught.value.partial == DATA[: len(DATA) // 4]
    server.heal()
    server.fail("short", times=1)
    assert ask(server, "a/0.bin")[2] == DATA[: len(DATA) // 2]
    assert ask(server, "a/0.bin")[2] == DATA
    assert [one.fault for one in server.log()] == ["refuse", "cut", "half", "short", ""]


@pytest.mark.parametrize("kind", ["hang", "stall"])
def test_silence(server, kind):
    """An answer hangs or stalls for its time, or until the client leaves."""
    server.fail(kind, times=1, seconds=0.2)
    begin = time.monotonic()
    assert ask(server, "a/0.bin")[2] == DATA
    assert time.monotonic() - begin >= 0.2
    server.heal()
    server.fail(kind)
    with pytest.raises((TimeoutError, socket.timeout)):
        ask(server, "a/0.bin", timeout=0.2)
    server.heal()
    assert ask(server, "a/0.bin")[2] == DATA


def test_chance(tmp_path):
    """A share of the requests fails, the same for the same seed and any order of keys."""

    def failed(seed, keys):
        with S3Server(dict.fromkeys(keys, b"1"), seed=seed) as server:
            server.fail("503", chance=0.2)
            for key in keys * 10:
                ask(server, key)
            return {key: [one.status for one in server.log(key)] for key in keys}

    keys = [f"{number}" for number in range(20)]
    first = failed(1, keys)
    # For 200 draws at 0.2, the deviation is 5.7, and five of them are allowed.
    assert 12 < sum(statuses.count(503) for statuses in first.values()) < 68
    assert failed(1, keys[::-1]) == first
    assert failed(2, keys) != first


def test_delay(server):
    """Answers come after the delay, many at the same time."""
    server.slow(0.2)
    address = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
    begin = time.monotonic()
    socks = [socket.create_connection(address) for _ in range(20)]
    for sock in socks:
        sock.sendall(b"GET /any/a/1.bin HTTP/1.1\r\n\r\n")
    for sock in socks:
        with sock:
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
    assert time.monotonic() - begin >= 0.2
    assert server.peak() > 10


# Clients leave threads and descriptors behind, and obstore survives no fork, so each has a process.
OBSTORE = """
import obstore
from obstore.exceptions import PreconditionError
from obstore.store import S3Store
from s3_server import S3Server

DATA = bytes(range(256)) * 400
keys = {f"many/{number % 7}/{number:03}": b"1" for number in range(50)}
with S3Server({"a/0.bin": DATA, "b & c.txt": b"", **keys}, page=4) as server:
    store = S3Store("any", **server.options, retry_config={"max_retries": 5})
    assert bytes(obstore.get(store, "a/0.bin").bytes()) == DATA
    assert bytes(obstore.get_range(store, "a/0.bin", start=10, end=20)) == DATA[10:20]
    assert obstore.head(store, "b & c.txt")["size"] == 0
    found = [one for chunk in obstore.list(store) for one in chunk]
    assert [one["path"] for one in found] == sorted(["a/0.bin", "b & c.txt", *keys])
    assert found[0]["size"] == len(DATA)
    assert server.count("*", "LIST") == 13, "pages of 4 keys"
    inside = [one["path"] for chunk in obstore.list(store, "many/3") for one in chunk]
    assert inside == sorted(key for key in keys if "y/3/" in key)
    etag = found[0]["e_tag"]
    assert bytes(obstore.get(store, "a/0.bin", options={"if_match": etag}).bytes()) == DATA
    server.put("a/0.bin", b"changed")
    try:
        obstore.get(store, "a/0.bin", options={"if_match": etag})
    except PreconditionError:
        pass
    else:
        raise AssertionError("the version was not checked")
    server.put("new.bin", b"new")
    server.forget()
    server.fail("503", times=2)
    assert bytes(obstore.get(store, "new.bin").bytes()) == b"new"
    assert [one.status for one in server.log()] == [503, 503, 200]
    try:
        obstore.get(store, "none")
    except FileNotFoundError:
        print("read")
"""
PYARROW = """
import io

import pyarrow
import pyarrow.parquet
from pyarrow.fs import FileSelector, FileType, S3FileSystem
from s3_server import S3Server

file = io.BytesIO()
pyarrow.parquet.write_table(pyarrow.table({"n": range(100)}), file, row_group_size=30)
with S3Server({"set/0.parquet": file.getvalue(), "set/b & c.txt": b""}) as server:
    host = server.endpoint.partition("//")[2]
    secrets = {"access_key": "key", "secret_key": "secret", "region": "us-east-1"}
    files = S3FileSystem(**secrets, endpoint_override=host, scheme="http")
    found = files.get_file_info(FileSelector("any", recursive=True))
    names = sorted(one.path for one in found if one.type == FileType.File)
    assert names == ["any/set/0.parquet", "any/set/b & c.txt"]
    table = pyarrow.parquet.ParquetFile("any/set/0.parquet", filesystem=files)
    assert table.num_row_groups == 4
    assert table.read_row_group(1)["n"].to_pylist() == list(range(30, 60))
    print("read")
"""


@pytest.mark.parametrize(
    ("module", "script"), [("obstore", OBSTORE), ("pyarrow", PYARROW)], ids=["obstore", "pyarrow"]
)
def test_clients(run_anew, module, script):
    """A client of S3 reads, lists, and finds versions and faults as in a real store."""
    if find_spec(module) is None:
        pytest.skip(f"not installed: {module}")
    done = run_anew(f"import sys\nsys.path.insert(0, {HELPERS!r})\n{script}")
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def test_end(server):
    """The process ends with its owner's end of the pipe, even while an answer hangs."""
    server.fail("hang")
    with socket.create_connection(("127.0.0.1", int(server.endpoint.rpartition(":")[2]))) as sock:
        sock.sendall(b"GET /any/a/0.bin HTTP/1.1\r\n\r\n")
        # A server that ends before it reads the request resets the connection.
        while not server.peak():
            time.sleep(0.005)
        server.process.stdin.close()
        assert server.process.wait(30) == 0
        assert sock.recv(1) == b""
