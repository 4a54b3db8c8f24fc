"""Stage 2: the arrays of a batch become tensors, on the CPU or a CUDA device.

The guarantee: what a batch becomes depends on ``out_type`` and ``dtype`` alone, bit for bit,
whichever pool ran it. numpy casts arrays, wherever this happens, and torch casts tensors on the
CPU. torch is imported when a converter is made, never with these modules.

::

    parse ──► for_test ──► resolve ──┬─► Converter       synchronous: inline, threads, trainer
    arguments  test mode   machine   └─► CudaConverter   copies on a stream of its own
                                            │ in a thread:   convert ─► Transfer ─► receive
                                            └ in a process:  export  ─► pickle   ─► Imports

``output``      what ``out_type`` and ``dtype`` mean, as far as this machine has it
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
