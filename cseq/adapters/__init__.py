"""Other libraries' interfaces: a folder, or a module, for each library.

``torch``          `DataLoader`: torch's loader, its workers run by cseq
``returnn``        `MultiProcDataset`: a RETURNN dataset whose sequences are loaded by workers
``torchdata``      `MultiProcessingReadingService`: DataLoader2's data pipes, run by workers

``lightning``      `DataModule`, `SaveState`; `Monitor`, which hands figures to its loggers
``transformers``   `BatchTrainer`, `SaveState`, `SeedEpochs`, `Monitor`
``keras``          `Batches`, `SaveState`
``torchtitan``     `TokenDataLoader`: rows of `cseq.tokens` for its trainer

None is imported with cseq. Each needs its library, and an ImportError says how to install it. In
an adapter, ``import NAME`` imports the library of that name, not the adapter.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["needs"]


@contextlib.contextmanager
def needs(library: str, package: str) -> Iterator[None]:
    """Import a library in this block, or say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ImportError(f"this needs {library}: pip install {package}", name=library) from error
