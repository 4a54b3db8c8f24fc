"""Blocks, mappings of files, and the arrays that are views on them."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from slots import PAGE, file_of

from cseq._memory import Block, Mapping, address_of, commit, copy_of
from cseq.memory.descriptors import sparse_file

if TYPE_CHECKING:
    from collections.abc import Callable


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


# -- mappings


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
    file = sparse_file(4 * PAGE)
    commit(file.fd, PAGE, PAGE)
    memoryview(Mapping(file.fd, PAGE, PAGE))[-1] = 33
    if sys.platform == "linux":
        taken = os.fstat(file.fd)
        assert (taken.st_size, taken.st_blocks * 512) == (4 * PAGE, PAGE)
    file.close()
    with pytest.raises(MemoryError, match=f"{PAGE} bytes"):
        commit(-1, 0, PAGE)
