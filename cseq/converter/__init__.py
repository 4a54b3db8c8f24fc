"""Stage 2: converts arrays in batches to tensors on the CPU or a CUDA device.

All pools produce bit-identical results. numpy casts arrays, and torch casts CPU tensors. torch is
imported when a converter is created.

::

    parse ──► for_test ──► resolve ──┬─► Converter       synchronous: inline, threads, trainer
    arguments  test mode   machine   └─► CudaConverter   copies on its own stream
                                            │ in a thread:   convert ─► Transfer ─► receive
                                            └ in a process:  export  ─► pickle   ─► Imports

``output``      parses ``out_type`` and ``dtype``, and resolves them on this machine
``host``        synchronous conversion
``lane``        a CUDA stream for copies
``cuda``        asynchronous conversion on a lane
``export``      transfers tensors from converter processes
``page_locks``  page-locked slots
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor as Tensor
    from torch.cuda import Event as Event

Array: TypeAlias = np.ndarray[Any, Any]
Dtype: TypeAlias = np.dtype[Any]
Batch: TypeAlias = object
Convert: TypeAlias = Callable[[Any], Batch]
