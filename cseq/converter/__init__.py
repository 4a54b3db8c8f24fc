"""Stage 2: convert the arrays of a batch to tensors on the CPU or a CUDA device.

The result depends only on ``out_type`` and ``dtype``, bit for bit, whichever pool runs the
conversion. numpy casts all arrays, and torch casts tensors on the CPU. torch is imported when a
converter is created, never with these modules.

::

    parse ──► for_test ──► resolve ──┬─► Converter       synchronous: inline, threads, trainer
    arguments  test mode   machine   └─► CudaConverter   copies on its own stream
                                            │ in a thread:   convert ─► Transfer ─► receive
                                            └ in a process:  export  ─► pickle   ─► Imports

``output``      the meaning of ``out_type`` and ``dtype`` on this machine
``host``        synchronous conversion
``lane``        a queue of copies to a device: a CUDA stream
``cuda``        asynchronous conversion, on a lane
``export``      tensors in a converter process, fetched by the trainer
``page_locks``  slots that CUDA copies from directly
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
