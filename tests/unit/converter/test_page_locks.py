"""Page-locked memory, with a test double of CUDA's runtime."""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from cseq.converter.output import say_once
from cseq.converter.page_locks import PageLocks

torch = pytest.importorskip("torch", reason="stage 2 makes torch tensors")


class Runtime:
    """The part of CUDA's runtime that page-locks memory."""

    def __init__(self, status):
        self.status = status
        self.locked = {}

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        assert flags == 1
        if address in self.locked:
            return 712
        if not self.status:
            self.locked[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address):  # noqa: N802
        if not self.status:
            del self.locked[address]
        return self.status


@dataclass(eq=False)
class Bytes:
    address: int
    nbytes: int


@pytest.fixture
def runtime(monkeypatch):
    """Replace CUDA's runtime."""
    fake = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)
    return fake


def test_memory_is_page_locked_once(runtime):
    """A mapping is page-locked once, and unlocked when it is released or all is closed."""
    locks = PageLocks("cuda:0")
    first, second = Bytes(4096, 8192), Bytes(65536, 4096)
    gone = weakref.ref(second)
    assert all(locks.register(one) for one in (first, first, second))
    assert runtime.locked == {4096: 8192, 65536: 4096}
    locks.unregister(first)
    locks.unregister(first)
    assert runtime.locked == {65536: 4096}
    # A mapping stays while it is page-locked.
    del second
    assert gone() is not None
    locks.close()
    assert gone() is None
    locks.close()
    assert runtime.locked == {}


def test_page_locking_may_fail(runtime, caplog, monkeypatch):
    """Memory that CUDA cannot page-lock is still used; the log says so once, without an error."""
    left = []

    def ones(*shape, device):
        left.append((shape, device))
        raise RuntimeError("the error that was left behind")

    monkeypatch.setattr(torch, "ones", ones)
    say_once.cache_clear()
    runtime.status = 2
    locks = PageLocks("cuda:1")
    memory = Bytes(4096, 4096)
    assert not locks.register(memory)
    assert not locks.register(memory)
    locks.close()
    assert left == [((1,), "cuda:1")] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "error 2" in caplog.text
