"""The file of slots takes no memory yet, cannot be cut, and is narrower where it must be."""

from __future__ import annotations

import errno
import gc
import os
import tempfile

import pytest
from slots import filled, whole

from cseq.encoding.writer import Writer
from cseq.memory.arena import FIRST, LARGE, Arena, reserved, room_for
from cseq.memory.descriptors import sparse_file
from cseq.system import MIB


@pytest.mark.needs("POSIX")
def test_a_file_takes_no_memory_yet() -> None:
    """A file is as long as it has to be and has no pages."""
    file = sparse_file(1 << 30)
    assert os.fstat(file.fd).st_size == 1 << 30
    assert os.fstat(file.fd).st_blocks == 0
    assert not os.get_inheritable(file.fd)
    file.close()
    file.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(file.fd)


def test_a_dropped_file_is_closed() -> None:
    """The descriptor goes with the object."""
    file = sparse_file(4096)
    fd = file.fd
    del file
    gc.collect()
    with pytest.raises(OSError, match=r"descriptor|handle"):
        os.fstat(fd)


@pytest.mark.needs("Linux")
def test_a_file_cannot_be_cut() -> None:
    """The pages cannot be taken away under a mapping."""
    file = sparse_file(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(file.fd, 0)
    file.close()


@pytest.mark.needs("POSIX")
def test_a_system_without_anonymous_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unlinked temporary file does as well, with slots as wide as the file system takes."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(os.listdir(tempfile.gettempdir()))
    arena = Arena()
    writer = Writer(arena.fd, arena.width)
    assert arena.width >= 1 << 28
    made = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in made if name.startswith("cseq-")]
    memories = [filled(arena, writer, value, 5 * MIB) for value in range(3)]
    for value, memory in enumerate(memories):
        assert (whole(memory, 5 * MIB) == value).all()
    writer.close()
    arena.close()


def test_a_file_system_without_long_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are narrower and fewer where a file cannot be that long."""
    real = os.ftruncate

    def cut(fd: int, length: int) -> None:
        if length > 1 << 40:
            raise OSError(errno.EFBIG, "File too large")
        real(fd, length)

    monkeypatch.setattr(os, "ftruncate", cut)
    arena = Arena()
    assert arena.width * arena.most <= 1 << 40
    assert arena.width >= 1 << 28
    arena.close()


@pytest.mark.needs("POSIX")
def test_a_file_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slots or of a ring: the error names the size, and the limit that may be the reason."""

    def refuse(fd: int, length: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    for make in (Arena, lambda: sparse_file(3 << 20)):
        with pytest.raises(OSError, match=r"bytes .*: File too large; .*ulimit -f") as caught:
            make()
        assert caught.value.errno == errno.EFBIG
    assert "3,145,728 bytes" in str(caught.value)


@pytest.mark.parametrize(("tickets", "width"), [(0, 512), (64, 512), (65, 256), (140, 128)])
def test_more_tickets_make_narrower_slots_on_windows(tickets: int, width: int) -> None:
    """There are slots for the tickets of two epochs and as many leases; 128 GiB, or 64, do."""
    sizes = reserved(tickets)
    assert sizes[0][0] == width * MIB
    assert [width * slots for width, slots in sizes] == [1 << 37, 1 << 36]
    assert all(slots >= max(256, 4 * tickets) for _, slots in sizes)


@pytest.mark.needs("POSIX")
def test_no_file_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that can have no file says so, and nothing stays open."""
    monkeypatch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(27, "too large")))
    with pytest.raises(OSError, match="too large"):
        Arena()


@pytest.mark.needs("Linux")
def test_too_many_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and names their limit instead of that of a file's size."""

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(OSError, match=r"Too many open files.*ulimit -n") as caught:
        Arena()
    assert "ulimit -f" not in str(caught.value)


@pytest.mark.needs("Linux")
def test_a_sandbox_that_refuses_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be sealed does as well."""
    import fcntl

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "no seals")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    arena = Arena()
    assert os.fstat(arena.fd).st_size == arena.width * arena.most
    arena.close()


def test_growth_is_geometric() -> None:
    """Small slots double, large ones grow by whole huge pages; none exceeds its width."""
    width = 64 * MIB
    assert room_for(1, 0, width) == FIRST
    assert room_for(FIRST + 1, FIRST, width) == 2 * FIRST
    assert room_for(LARGE, FIRST, width) == LARGE
    assert room_for(LARGE + 1, FIRST, width) == 2 * LARGE
    assert room_for(5 * LARGE, 3 * LARGE, width) == 5 * LARGE
    assert room_for(3 * LARGE - 1, LARGE, 3 * LARGE - 1) == 3 * LARGE - 1
    with pytest.raises(MemoryError, match="batch_size"):
        room_for(width + 1, 0, width)
