"""torchtitan support: a dataloader for `cseq.tokens` rows.

It supports torchtitan 0.3.0 and the development versions since August 2026.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - torchtitan reads the annotations of Config
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cseq.adapters import needs
from cseq.check import flag, integer
from cseq.kinds import MPSequence
from cseq.tokens.rows import Rows

with needs("torchtitan", "torchtitan"):
    try:
        from torchtitan.components.data.loader import BaseDataLoader
    except ModuleNotFoundError as error:
        if error.name != "torchtitan.components.data":
            raise
        from torchtitan.components.dataloader import BaseDataLoader
    import tyro

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["TokenDataLoader"]

KEYS = ("input_ids", "position_ids", "labels")


class TokenDataLoader(BaseDataLoader):  # type: ignore[misc]
    """A dataloader that feeds batches of rows to torchtitan's trainer and validator.

    A batch is ``({"input", "positions"}, labels)``. Tensors are int64, of shape
    ``(local_batch_size, seq_len)`` in torchtitan 0.3.0 and ``(num_tokens_per_batch,)`` in newer
    versions. An incomplete last global batch is dropped. Runs resume exactly from torchtitan's
    checkpoints, even with a different batch size or number of data-parallel ranks.

    Attributes
    ----------
    manager : MPSequence
        The manager that makes the batches. Use it to call `stats` and `advice`.

    Examples
    --------
    >>> def rows(length):
    ...     return tokens.Rows({"web": tokens.Megatron("web_text_document")}, length)
    >>> config.dataloader = TokenDataLoader.Config(rows=rows, seed=7)  # doctest: +SKIP
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Configuration for the rows and workers.

        Attributes
        ----------
        rows : callable
            A function that takes the row length (torchtitan's ``seq_len`` or
            ``max_context_length``) and returns a `cseq.tokens.Rows`.
        seed : int
            The seed for the row order.
        num_workers : int
            The number of worker processes per rank, or 0 to make batches in the trainer.
        repeat : bool
            If False, training stops after one epoch.
        infinite : bool, optional
            Overrides `repeat`, for torchtitan 0.3.0's validator.
        """

        rows: Annotated[Callable[[int], Any] | None, tyro.conf.Suppress] = None
        seed: int = 0
        num_workers: int = 1
        repeat: bool = True
        infinite: Annotated[bool | None, tyro.conf.Suppress] = None

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        **_: Any,
    ) -> None:
        for name in ("dataset", "dataset_path"):
            if given := getattr(config, name, None):
                raise ValueError(
                    f"dataloader.{name}={given!r} is not supported: this loader does not read "
                    "torchtitan's data sets; omit it, and open the files in the rows= function"
                )
        if not callable(config.rows):
            raise TypeError(
                f"rows={config.rows!r} is not callable; pass a function that takes the row length "
                "and returns a cseq.tokens.Rows"
            )
        self._is_flat = seq_len is None
        if self._is_flat:
            length = integer("max_context_length", max_context_length)
            size = integer("num_tokens_per_batch", num_tokens_per_batch)
            if size % length:
                raise ValueError(
                    f"num_tokens_per_batch={size} is not a multiple of max_context_length={length}"
                    "; set training.num_tokens_per_microbatch_per_dp_rank to a multiple"
                )
            batch_size = size // length
        else:
            length = integer("seq_len", seq_len)
            batch_size = integer("local_batch_size", local_batch_size)
        rows = config.rows(length)
        if not isinstance(rows, Rows) or rows.row != length or rows.flat:
            raise TypeError(
                f"rows={config.rows!r} returned {rows!r}; return a cseq.tokens.Rows with the "
                f"requested row length, {length}, and without flat="
            )
        endless = config.repeat if config.infinite is None else config.infinite
        self._is_endless = flag("repeat", endless)
        self.manager = MPSequence(
            rows.only(KEYS),
            batch_size=batch_size,
            num_workers=config.num_workers,
            seed=config.seed,
            shard=(dp_rank, dp_world_size),
            drop_last=True,
            repeat=True if self._is_endless else 1,
            out_type="cpu",
            dtype=None,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Start new workers and iterate from the current position.

        The iterator ends with StopIteration, because the validator handles no other exception. The
        trainer converts it to a DataloaderExhaustedError.
        """
        manager, state = self.manager, self.state_dict()
        if state["epoch"] and not self._is_endless:
            return
        manager.load_state_dict(state)
        manager.start()
        try:
            for batch in manager:
                parts = (batch[key] for key in KEYS)
                tokens, positions, labels = (p.flatten() if self._is_flat else p for p in parts)
                yield {"input": tokens, "positions": positions}, labels
        finally:
            manager.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, the same on all ranks."""
        return self.manager.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position. An empty dict has no effect."""
        if state_dict:
            self.manager.load_state_dict(state_dict)

    def close(self) -> None:
        """Stop the workers."""
        self.manager.finish()
