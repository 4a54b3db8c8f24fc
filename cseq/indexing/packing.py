"""`packed`: pickled objects in shared memory."""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import sys
import types
from array import array
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import context, reduction
from typing import Any, TypeVar

import numpy as np

from cseq import _memory
from cseq.encoding.pickling import publish, unpicklable
from cseq.encoding.survey import batch_reducers
from cseq.memory.descriptors import sparse_file

__all__ = ["PackedItems", "packed"]

T = TypeVar("T")

REMEDY = (
    "Items are stored as pickles: leave such an object out of the item, and create it when you "
    "read the item"
)


def packed(items: Iterable[T]) -> PackedItems[T]:
    """Pack Python objects into a buffer that all workers share, with any start method.

    Reading an object from a list updates its reference count, so each worker process soon has its
    own copy of the list. All processes share one copy of packed objects.

    Parameters
    ----------
    items : iterable
        Objects that can be pickled.

    Returns
    -------
    PackedItems
        An immutable sequence, with immutable slices. Items are unpickled when they are accessed.

    Examples
    --------
    >>> samples = cseq.packed({"text": "a" * n, "label": n} for n in range(4))
    >>> len(samples), samples[2], samples[-2:][1]["text"]
    (4, {'text': 'aa', 'label': 2}, 'aaa')
    """
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise TypeError(f"items is a {type(items).__name__}; pass a list or another iterable")
    out, ends = io.BytesIO(), array("q", [0])
    pickler = _Pickler(out)
    for number, item in enumerate(items):
        try:
            pickler.dump(item)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the message says where and why
            raise unpicklable(f"items[{number}]", error, REMEDY) from None
        pickler.clear_memo()
        ends.append(out.tell())
    out.write(ends)
    with out.getbuffer() as buffer:
        file = sparse_file(buffer.nbytes, "cseq-packed")
        _memory.commit(file.fd, 0, buffer.nbytes)
        data = memoryview(_memory.Mapping(file.fd, 0, buffer.nbytes))
        data[:] = buffer
    return PackedItems(data, file, range(len(ends) - 1), len(ends), [*pickler.named.values()])


class PackedItems(Sequence[T]):
    """The result of `packed`: pickles, followed by the end offset of each.

    `numbers` are the item numbers of a slice. `named` contains the classes and functions that items
    refer to.
    """

    def __init__(self, data: Any, file: Any, numbers: range, ends: int, named: list[Any]) -> None:
        self._data = memoryview(data)
        self._file = file
        self._numbers = numbers
        self._ends = self._data[-8 * ends :].cast("q")
        self._named = named
        publish(named)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        number = self._numbers[index]
        if isinstance(number, range):
            return PackedItems(self._data, self._file, number, len(self._ends), self._named)
        return pickle.loads(self._data[self._ends[number] : self._ends[number + 1]])

    def __reduce__(self) -> Any:
        """Pickle the file descriptor if a child process can receive it, otherwise the bytes."""
        rest = self._numbers, len(self._ends), self._named
        if self._file and os.name != "nt" and context.get_spawning_popen() is not None:
            with contextlib.suppress(RuntimeError):
                return _mapped, (reduction.DupFd(self._file.fd), self._data.nbytes, *rest)
        return PackedItems, (np.frombuffer(self._data, np.uint8), None, *rest)


def _mapped(handed: Any, nbytes: int, *rest: Any) -> PackedItems[Any]:
    file = _memory.Descriptor(handed.detach)
    return PackedItems(_memory.Mapping(file.fd, 0, nbytes), file, *rest)


class _Pickler(pickle.Pickler):
    """Records the classes and functions that items refer to by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.named: dict[Any, Any] = {}
        self.dispatch_table = copyreg.dispatch_table | batch_reducers(handles=False)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            name = obj.__qualname__.partition(".")[0]
            outer = getattr(sys.modules.get(obj.__module__), name, None)
            if isinstance(outer, (type, types.FunctionType)):
                self.named[obj.__module__, name] = outer
        return NotImplemented
