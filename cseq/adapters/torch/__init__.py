"""torch's DataLoader, running on cseq's engine.

``cseq.DataLoader`` is a `torch.utils.data.DataLoader` with cseq's workers. `install` makes torch's
own class use them. See docs/how-to/from-dataloader.md and dataloader-differences.md.

::

    trainer                                               worker process
      loader.DataLoader ─► iterator.LoaderIterator          worker.Fetcher: seeds, fetches, collates
        pinning.py pins the next batch
        batches.py cseq orders: ranks.py
        order.py   sampler keys         ── Streams.begin ─►   collate.py   stacks into the slot
        state.py   epoch position       ◄── slots ─────────

Importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cseq.adapters.torch.batches import BatchSampler as BatchSampler
    from cseq.adapters.torch.iterator import LoaderTimeout as LoaderTimeout
    from cseq.adapters.torch.loader import DataLoader as DataLoader
    from cseq.adapters.torch.loader import StatefulDataLoader as StatefulDataLoader
    from cseq.adapters.torch.options import defaults as defaults
    from cseq.adapters.torch.patch import install as install
    from cseq.adapters.torch.patch import installed as installed
    from cseq.adapters.torch.patch import is_installed as is_installed
    from cseq.adapters.torch.patch import uninstall as uninstall

MISSING = "cseq.DataLoader needs torch; install it with: pip install 'cseq-loader[torch]'"

_HOMES = {
    "BatchSampler": "batches",
    "DataLoader": "loader",
    "LoaderTimeout": "iterator",
    "StatefulDataLoader": "loader",
    "defaults": "options",
    "install": "patch",
    "installed": "patch",
    "is_installed": "patch",
    "uninstall": "patch",
}

__all__ = [*_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import the module that defines `name`."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(MISSING, name="torch") from error
    return getattr(module, name)
