"""Blocks, mappings of files, and the arrays that are views on them."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from slots import PAGE, file_of

from cseq._memory import Block, Mapping, Memory, Window, address_of, commit, copy_of
from cseq.memory.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_block_is_aligned() -> None:
    """A block begins at a cache line, whatever its size; it is zero if that was asked for."""
    blocks = [Block(n, zero=True) for n in (0, 1, 63, 1000, 10**6)]
    assert {block.address % 64 for block in blocks} == {0}
    assert [block.nbytes for block in blocks] == [0, 1, 63, 1000, 10**6]
    assert not any(np.frombuffer(block, np.uint8).any() for block in blocks[1:])


def test_a_block_of_nonsense() -> None:
    """Negative sizes are refused, and ones that no machine has."""
    with pytest.raises(ValueError, match="-1"):
        Block(-1)
    with pytest.raises(MemoryError, match=r"\d bytes"):
        Block(2**62)
    with pytest.raises(TypeError):
        Block("1")  # type: ignore[arg-type]


def test_a_view_is_no_copy_and_keeps_the_memory() -> None:
    """A view lies in the memory, can be written to, and keeps it alive; so does a view of it."""
    block = Block(1024, zero=True)
    view = block.view(64, np.dtype("<i4"), (3, 5))
    assert address_of(view) == block.address + 64
    assert view.base is block
    assert (view.flags.c_contiguous, view.flags.writeable, view.flags.owndata) == (
        True,
        True,
        False,
    )
    view[2, 4] = 7
    assert bytes(memoryview(block)[120:124]) == b"\7\0\0\0"
    part = view[2:, 3:]
    del block, view
    gc.collect()
    assert part.tolist() == [[0, 7]]


def test_a_view_in_fortran_order() -> None:
    """A view can be column-major."""
    block = Block(64, zero=True)
    view = block.view(0, np.dtype("u1"), (2, 3), True)
    view[1, 0] = 5
    assert view.flags.f_contiguous
    assert bytes(memoryview(block)[:3]) == b"\0\5\0"


@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 2), (1,) * 64])
def test_views_of_little(shape: tuple[int, ...]) -> None:
    """Views may have no dimension, no elements, or as many dimensions as numpy has."""
    if len(shape) == 64 and int(np.__version__.split(".")[0]) < 2:
        pytest.skip("numpy 1 has 32 dimensions")
    assert Block(8).view(0, np.dtype("f8"), shape).shape == shape


BAD_VIEWS = [
    (0, "u1", (101,), IndexError),
    (100, "u1", (1,), IndexError),
    (-1, "u1", (1,), IndexError),
    (101, "u1", (0,), IndexError),
    (2**63 - 1, "u1", (2,), IndexError),
    (0, "u1", (-1,), ValueError),
    (0, "u1", (0, -5), ValueError),
    (0, "f8", (2**40, 2**40), ValueError),
    (0, "O", (1,), ValueError),
    (0, [("a", "O")], (1,), ValueError),
    (0, "u1", (1,) * 65, ValueError),
    (0, "u1", ("a",), TypeError),
]


@pytest.mark.parametrize(("offset", "dtype", "shape", "kind"), BAD_VIEWS)
def test_views_outside(offset: int, dtype: Any, shape: Any, kind: type[Exception]) -> None:
    """A view that does not lie in the memory, or could not, is refused."""
    with pytest.raises(kind):
        Block(100).view(offset, np.dtype(dtype), shape)


def test_bytes_in_and_out() -> None:
    """What is stored is loaded, small and large."""
    block = Block(200_000, zero=True)
    for data in (b"", b"abc", os.urandom(70_000)):
        memoryview(block)[5 : 5 + len(data)] = data
        block.store_from(100_000, copy_of(block, len(data), 5), len(data))
        assert bytes(copy_of(block, len(data), 100_000)) == data


@pytest.mark.parametrize(
    "use",
    [
        lambda b: b.store_from(98, b, 3),
        lambda b: b.store_from(-1, b, 3),
        lambda b: copy_of(b, 101),
        lambda b: copy_of(b, 50, 51),
    ],
)
def test_outside(use: Callable[[Block], Any]) -> None:
    """Nothing is read or written outside of a memory."""
    with pytest.raises(IndexError, match="100 bytes"):
        use(Block(100))


def test_copies() -> None:
    """`copy_of` copies the beginning of a memory, small or large."""
    block = Block(100_000)
    view = block.view(0, np.dtype("u1"), (100_000,))
    view[:] = np.arange(100_000) % 251
    for n in (0, 10, 100_000):
        copy = copy_of(block, n)
        assert (copy.nbytes, bytes(memoryview(copy)[:n])) == (n, view[:n].tobytes())
    with pytest.raises(TypeError):
        copy_of(None, 3)  # type: ignore[arg-type]


def test_buffers() -> None:
    """A memory exports its bytes, writable, and lives as long as they are used."""
    block = Block(8, zero=True)
    gone = weakref.ref(block) if hasattr(block, "__weakref__") else None
    view = memoryview(block)
    assert (view.format, view.nbytes, view.readonly) == ("B", 8, False)
    view[3] = 9
    del block
    gc.collect()
    assert bytes(view) == b"\0\0\0\x09\0\0\0\0"
    assert gone is None


def test_a_window() -> None:
    """A window is the same bytes under another object, whose end can be seen."""
    block = Block(16, zero=True)
    window = Window(block)
    gone = weakref.ref(window)
    view = window.view(0, np.dtype("u1"), (16,))
    view[0] = 3
    assert bytes(memoryview(block)[:1]) == b"\3"
    assert (window.address, window.nbytes) == (block.address, 16)
    del window
    assert gone() is not None
    del view
    assert gone() is None
    with pytest.raises(TypeError):
        Window(None)  # type: ignore[arg-type]


# -- mappings


def test_mappings_share() -> None:
    """Two mappings of the same part of a file have the same bytes."""
    with file_of(3 * PAGE) as fd:
        one, other = Mapping(fd, PAGE, PAGE), Mapping(fd, PAGE, 2 * PAGE)
    memoryview(one)[10:15] = b"hello"
    assert bytes(memoryview(other)[10:15]) == b"hello"
    assert (one.nbytes, other.nbytes) == (PAGE, 2 * PAGE)
    assert one.address % PAGE in range(PAGE)


def test_a_mapping_lives_with_its_arrays() -> None:
    """A mapping is gone when the last array on it is, not earlier and not later."""
    with file_of(PAGE) as fd:
        mapping = Mapping(fd, 0, PAGE)
    address = mapping.address
    view = mapping.view(0, np.dtype("u1"), (PAGE,))[5:]
    del mapping
    view[0] = 4
    if sys.platform == "linux":
        assert f"{address:x}-" in Path("/proc/self/maps").read_text()
        del view
        assert f"\n{address:x}-" not in Path("/proc/self/maps").read_text()


def test_mappings_of_nonsense() -> None:
    """No bytes, too many, a part that begins within a page, or no file: refused with the bytes."""
    with file_of(PAGE) as fd:
        for nbytes in (0, 2**63):
            with pytest.raises(ValueError, match=str(nbytes)):
                Mapping(fd, 0, nbytes)
        with pytest.raises(MemoryError, match=f"{PAGE} bytes"):
            Mapping(fd, 1, PAGE)
        with pytest.raises(MemoryError, match="bytes"):
            Mapping(fd, 0, 2**60)
        with pytest.raises(OverflowError):
            Mapping(fd, -PAGE, PAGE)
    with pytest.raises(MemoryError):
        Mapping(-1, 0, PAGE)


def test_commit() -> None:
    """Committed pages take room on the file; what cannot be had is a MemoryError with the bytes."""
    segment = Segment.create(4 * PAGE)
    commit(segment.fd, PAGE, PAGE)
    memoryview(Mapping(segment.fd, PAGE, PAGE))[-1] = 33
    if sys.platform == "linux":
        taken = os.fstat(segment.fd)
        assert (taken.st_size, taken.st_blocks * 512) == (4 * PAGE, PAGE)
    segment.close()
    with pytest.raises(MemoryError, match=f"{PAGE} bytes"):
        commit(-1, 0, PAGE)


def test_address_of() -> None:
    """`address_of` is where an array's data begins; of arrays alone."""
    array = np.arange(10)
    assert address_of(array[3:]) == array.ctypes.data + 24
    with pytest.raises(TypeError):
        address_of([1])  # type: ignore[arg-type]


def test_memory_itself_is_empty() -> None:
    """The base class has no bytes."""
    assert (Memory().nbytes, Memory().address) == (0, 0)
