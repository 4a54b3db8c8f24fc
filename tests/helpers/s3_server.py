"""A subset of S3 on loopback, in a process of its own, that can be slow or fail.

It knows GET with Range and If-Match, HEAD, and ListObjectsV2 without a delimiter, in buckets of any
name. `S3Server` starts it, and tells it how to fail::

    with S3Server({"train/0.tar": data}, delay=0.2) as server:
        store = S3Store("any", **server.options)
        server.fail("503", chance=0.1)
        server.fail("cut", key="train/0.tar", times=1)
        ...
        assert server.count("train/0.tar") == 2
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
import xml.sax.saxutils
from email.utils import formatdate
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from urllib.request import Request, urlopen

PATIENCE = 60.0
# Requests to this bucket control the server; they are neither delayed nor counted.
CONTROL = "-control-"
# Bytes per write.
PART = 1 << 20
# The faults of an answer, other than a status such as "503".
FAULTS = {
    "refuse": "the connection is reset before a byte of the answer",
    "hang": "no byte of the answer comes",
    "stall": "a part of the body comes, then nothing",
    "cut": "a part of the body comes, then the connection is reset",
    "half": "a part of the body comes, then the connection is closed, as if that were all",
    "short": "a part of the body comes, and Content-Length says that this is all",
    "etag": "the answer has another ETag than before",
}


class Seen(NamedTuple):
    """A request that the server has answered or failed to answer.

    `span` is the header Range, or ""; `status` is 0 if none was sent; `fault` is the fault, or "";
    `sent` counts the bytes of the body; `began` is in seconds on the server's clock.
    """

    method: str
    key: str
    span: str
    status: int
    fault: str
    sent: int
    began: float


class S3Server:
    """The server's process, from `with` to its end.

    `objects` are keys and their contents, in memory, or a folder, whose files are read on request.
    Each answer waits for `delay` seconds. Random faults depend on `seed`, the key and the number of
    its requests, not on the order of the requests. One page of a listing has at most `page` keys.
    """

    def __init__(self, objects=(), *, delay=0.0, seed=0, page=1000):
        self.folder = objects if isinstance(objects, (str, os.PathLike)) else None
        self.objects = {} if self.folder is not None else dict(objects)
        self.settings = {"delay": delay, "seed": seed, "page": page}

    def __enter__(self):
        folder = None if self.folder is None else str(Path(self.folder).resolve())
        command = [sys.executable, __file__, json.dumps({**self.settings, "folder": folder})]
        ends = dict.fromkeys(["stdin", "stdout"], subprocess.PIPE)
        self.process = subprocess.Popen(command, text=True, **ends)
        self.endpoint = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"
        try:
            for key, data in self.objects.items():
                self.put(key, data)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """End the process, which also ends with its standard input and so outlives no dead test."""
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    @property
    def options(self):
        """The arguments of `obstore.store.S3Store` after the bucket's name."""
        secrets = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        return {"endpoint": self.endpoint, "client_options": {"allow_http": True}, **secrets}

    def put(self, key, data):
        """Make an object, or replace a key's object, whose ETag then changes."""
        self._ask("put", key=key, body=bytes(data))

    def remove(self, key):
        self._ask("remove", key=key)

    def fail(self, kind, *, key="*", method="GET", **options):
        """Let requests fail from now on: with a status, such as "503", or one of `FAULTS`.

        `key` is an `fnmatch` pattern of keys (for a listing, of the prefix), and `method` is "GET",
        "HEAD", "LIST" or "*". Of a key's requests, the first `after` are answered; each of the
        others fails with the probability `chance`, at most `times` of them. `at` is the fraction of
        the body that is sent. An answer hangs or stalls for `seconds`, or until the client leaves.
        A 503 asks the client to wait for `retry_after` seconds.
        """
        if not (kind in FAULTS or kind.isdecimal()):
            raise ValueError(f"kind={kind!r} is neither a status nor one of {', '.join(FAULTS)}")
        known = {"after", "times", "chance", "at", "seconds", "retry_after"}
        if unknown := set(options) - known:
            raise TypeError(f"no option of a fault: {', '.join(sorted(unknown))}")
        self._ask("fail", body={"kind": kind, "key": key, "method": method, **options})

    def heal(self):
        self._ask("heal")

    def log(self, key="*", method="*"):
        """Return the requests for these keys since `forget`, in the order in which they ended."""
        seen = [Seen(*one) for one in json.loads(self._ask("log"))]
        return [one for one in seen if fnmatchcase(one.key, key) and method in ("*", one.method)]

    def count(self, key="*", method="GET"):
        """Return the number of requests for these keys since `forget`."""
        return len(self.log(key, method))

    def peak(self):
        """Return the maximum number of simultaneous requests since `forget`."""
        return int(self._ask("peak"))

    def forget(self):
        """Empty the log, and restart the counts of the faults."""
        self._ask("forget")

    def slow(self, delay):
        self._ask("slow", body=delay)

    def _ask(self, verb, key="", body=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        address = f"{self.endpoint}/{CONTROL}/{verb}?key={quote(key, safe='')}"
        with urlopen(Request(address, data=data, method="POST"), timeout=PATIENCE) as answer:
            return answer.read().decode()


class Stored(NamedTuple):
    data: bytes | str
    size: int
    etag: str
    changed: float

    def part(self, first, stop):
        if isinstance(self.data, bytes):
            return memoryview(self.data)[first:stop]
        with open(self.data, "rb") as file:
            file.seek(first)
            return file.read(stop - first)


class Asked(NamedTuple):
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Reply(NamedTuple):
    """An answer: its status, headers and body, which may be part of an object."""

    status: str
    headers: dict[str, object]
    body: bytes | memoryview = b""


XML, AS_XML = '<?xml version="1.0" encoding="UTF-8"?>', {"Content-Type": "application/xml"}


def error_reply(status, code, headers=()):
    """Return an error as S3 reports it."""
    body = f"{XML}<Error><Code>{code}</Code></Error>"
    return Reply(f"{status} {code}", {**AS_XML, **dict(headers)}, body.encode())


def span_of(header, size):
    """Return the begin and end of a range in an object, or None if there is no such byte."""
    first, _, last = header.partition("=")[2].partition("-")
    if not first:
        length = min(int(last), size)
        return (size - length, size) if length else None
    start = int(first)
    stop = min(int(last) + 1, size) if last else size
    return (start, stop) if start < stop else None


class Served:
    """The running server: its objects, in memory and in the files of a folder, rules and log."""

    def __init__(self, folder, delay, seed, page):
        self.folder, self.kept = folder and Path(folder), {}
        self.delay, self.seed, self.page = delay, seed, page
        # By key: requests of each method, and failures by each rule.
        self.rules, self.asked, self.failed = [], {}, {}
        self.seen, self.now, self.most = [], 0, 0

    def find(self, key):
        if key in self.kept or not (self.folder and key):
            return self.kept.get(key)
        path = self.folder / key
        if not path.is_file():
            return None
        stat = path.stat()
        etag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
        return Stored(str(path), stat.st_size, etag, stat.st_mtime)

    def keys(self, prefix):
        """Return all keys with a prefix, in S3's order."""
        found = set(self.kept)
        if self.folder:
            files = (path for path in self.folder.rglob("*") if path.is_file())
            found.update(path.relative_to(self.folder).as_posix() for path in files)
        return sorted(key for key in found if key.startswith(prefix))

    def rule_for(self, method, key):
        """Return the rule that makes this request fail, or one that lets it pass."""
        nth = self.asked[method, key] = self.asked.get((method, key), -1) + 1
        for number, rule in enumerate(self.rules):
            failed = self.failed.get((number, key), 0)
            drawn = random.Random(f"{self.seed}/{number}/{method}/{key}/{nth}").random()
            if (
                rule["method"] in ("*", method)
                and fnmatchcase(key, rule["key"])
                and nth >= rule.get("after", 0)
                and failed < rule.get("times", float("inf"))
                and drawn < rule.get("chance", 1.0)
            ):
                self.failed[number, key] = failed + 1
                return rule
        return {"kind": ""}

    async def serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while asked := await self.read(reader):
                if asked.bucket == CONTROL:
                    await self.send(writer, asked, self.obey(asked))
                elif not await self.answer(asked, reader, writer):
                    break
        writer.close()

    async def read(self, reader):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        method, target, _ = first.split(" ", 2)
        named = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in named}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        address = urlsplit(target)
        bucket, _, key = address.path.lstrip("/").partition("/")
        query = dict(parse_qsl(address.query, keep_blank_values=True))
        return Asked(method, bucket, unquote(key), query, headers, body)

    def obey(self, asked):
        """Obey a request from the test."""
        key = asked.query["key"]
        match asked.key:
            case "put":
                etag = f'"{hashlib.md5(asked.body).hexdigest()}"'
                self.kept[key] = Stored(asked.body, len(asked.body), etag, time.time())
            case "remove":
                self.kept.pop(key)
            case "fail":
                self.rules.append(json.loads(asked.body))
            case "heal":
                self.rules, self.failed = [], {}
            case "forget":
                self.asked, self.failed, self.seen, self.most = {}, {}, [], self.now
            case "slow":
                self.delay = json.loads(asked.body)
        told = {"log": json.dumps(self.seen), "peak": str(self.most)}
        return Reply("200 OK", {}, told.get(asked.key, "").encode())

    async def answer(self, asked, reader, writer):
        """Answer a request, or fail to; return whether the connection stays open."""
        lists = not asked.key and asked.method == "GET"
        method = "LIST" if lists else asked.method
        key = asked.query.get("prefix", "") if lists else asked.key
        rule = self.rule_for(method, key)
        seen = [method, key, asked.headers.get("range", ""), 0, rule["kind"], 0, time.monotonic()]
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.delay)
            return await self.fail_or_send(asked, reader, writer, rule, seen)
        finally:
            self.now -= 1
            self.seen.append(seen)

    async def fail_or_send(self, asked, reader, writer, rule, seen):
        """Send the part of an answer that a rule allows, and log the fault."""
        kind = rule["kind"]
        if kind == "refuse":
            reset(writer)
            return False
        if kind == "hang" and not await passed(reader, rule.get("seconds")):
            return False
        if kind.isdecimal():
            after = {"Retry-After": rule["retry_after"]} if "retry_after" in rule else {}
            reply = error_reply(kind, "SlowDown", after)
        else:
            reply = self.reply(asked)
        whole = len(reply.body)
        if kind == "etag" and "ETag" in reply.headers:
            reply.headers["ETag"] = '"changed"'
        if kind == "short":
            reply = reply._replace(body=reply.body[: int(whole * rule.get("at", 0.5))])
        seen[3] = int(reply.status.split()[0])
        broken = kind in ("stall", "cut", "half")
        stop = int(whole * rule.get("at", 0.5)) if broken else None
        seen[5] = await self.send(writer, asked, reply, stop)
        if kind == "stall":
            if not await passed(reader, rule.get("seconds")):
                return False
            rest = reply.body[stop:]
            writer.write(rest)
            await writer.drain()
            seen[5] += len(rest)
        if kind == "cut":
            reset(writer)
        return kind not in ("cut", "half")

    def reply(self, asked):
        """Return a healthy server's answer."""
        if not asked.key:
            return self.listing(asked.query)
        found = self.find(asked.key)
        if found is None:
            return error_reply(404, "NoSuchKey")
        if asked.headers.get("if-match", found.etag) not in (found.etag, "*"):
            return error_reply(412, "PreconditionFailed")
        headers = {
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
            "ETag": found.etag,
            "Last-Modified": formatdate(found.changed, usegmt=True),
        }
        if "range" not in asked.headers:
            return Reply("200 OK", headers, found.part(0, found.size))
        span = span_of(asked.headers["range"], found.size)
        if span is None:
            return error_reply(416, "InvalidRange", {"Content-Range": f"bytes */{found.size}"})
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{found.size}"
        return Reply("206 Partial Content", headers, found.part(*span))

    def listing(self, query):
        """Return a page of a bucket's keys in ListObjectsV2's format."""
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")

        def written(text):
            encodes = query.get("encoding-type") == "url"
            return xml.sax.saxutils.escape(quote(text) if encodes else text)

        keys = [key for key in self.keys(prefix) if key > after]
        page, more, entries = keys[: self.page], len(keys) > self.page, []
        for key in page:
            found = self.find(key)
            date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.changed))
            entries.append(
                f"<Contents><Key>{written(key)}</Key><LastModified>{date}</LastModified>"
                f"<ETag>{xml.sax.saxutils.escape(found.etag)}</ETag><Size>{found.size}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        token = "NextContinuationToken"
        token = f"<{token}>{written(page[-1])}</{token}>" if more else ""
        body = (
            f'{XML}<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Prefix>{written(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{self.page}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"{''.join(entries)}</ListBucketResult>"
        )
        return Reply("200 OK", AS_XML, body.encode())

    async def send(self, writer, asked, reply, stop=None):
        """Write an answer, with its body up to `stop`; return the number of bytes of the body."""
        headers = {"Content-Length": len(reply.body), **reply.headers}
        lines = [f"HTTP/1.1 {reply.status}", *(f"{name}: {headers[name]}" for name in headers)]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        body = b"" if asked.method == "HEAD" else reply.body[:stop]
        for first in range(0, len(body), PART):
            writer.write(body[first : first + PART])
            await writer.drain()
        await writer.drain()
        return len(body)


async def passed(reader, seconds):
    """Wait, at most until the client leaves; return whether it is still there."""
    try:
        # A client sends nothing while it waits for an answer.
        await asyncio.wait_for(reader.read(1), seconds)
    except asyncio.TimeoutError:
        return True
    return False


def reset(writer):
    """Close a connection so that the client sees an error instead of an end."""
    sock = writer.get_extra_info("socket")
    at_once = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    writer.transport.abort()


async def main():
    """Serve until standard input ends."""
    served = Served(**json.loads(sys.argv[1]))
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    # Open connections, and answers that hang, end with the process.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
