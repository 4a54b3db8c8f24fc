"""Adapters for other libraries, one package or module per library.

``torch``          `DataLoader`: torch's loader with cseq's workers
``returnn``        `MultiProcDataset`: a RETURNN dataset that loads sequences in worker processes
``torchdata``      `MultiProcessingReadingService`: runs DataLoader2's data pipes in workers

``lightning``      `DataModule`, `SaveState`; `Monitor`, which sends metrics to Lightning's loggers
``transformers``   `BatchTrainer`, `SaveState`, `SeedEpochs`, `Monitor`
``keras``          `Batches`, `SaveState`
``torchtitan``     `TokenDataLoader`, which feeds `cseq.tokens` rows to torchtitan's trainer

cseq does not import adapters automatically. Importing one raises an ImportError with install
instructions if its library is missing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["needs"]


@contextlib.contextmanager
def needs(library: str, package: str) -> Iterator[None]:
    """Raise an ImportError with install instructions if `library` is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        text = f"this adapter needs {library}; install it with: pip install {package}"
        raise ImportError(text, name=library) from error
