"""Splits each row's tokens among ranks (context parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq.check import flag
from cseq.order import shard as shards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cseq.order.shard import Given

ALONG = ("input_ids", "labels", "position_ids", "document_ids")


def split_context(
    batch: Mapping[str, Any], shard: Given, *, balanced: bool = False
) -> dict[str, Any]:
    """Extract this rank's part of each row from a batch made by `Rows`.

    Parameters
    ----------
    batch : dict
        Arrays, or tensors on any device.
    shard : (rank, world_size), process group, or one-dimensional DeviceMesh
        This rank's place among the ranks that share the batch, such as ``mesh["cp"]``.
    balanced : bool
        If True, each row is split into 2n parts, and rank r of n gets parts r and 2n - 1 - r. With
        a causal mask, all ranks then do equal work. By default, each rank gets consecutive
        tokens.

    Returns
    -------
    dict
        The batch with all per-token arrays split. Other values still describe the whole batch.

    Raises
    ------
    TypeError, ValueError
        If `shard` is invalid, or if a row cannot be split into equal parts.

    Examples
    --------
    >>> batch = {"input_ids": np.arange(8).reshape(1, 8)}
    >>> tokens.split_context(batch, (0, 2), balanced=True)["input_ids"]
    array([[0, 1, 6, 7]])
    """
    place = None if shard is None else shards.check_shard(shard)
    if place is None:
        raise ValueError(f"shard={shard!r} is not a rank; pass mesh['cp'] or (rank, world_size)")
    pieces = place.world_size * (2 if flag("balanced", balanced) else 1)
    own = [place.rank, pieces - 1 - place.rank] if balanced else [place.rank]
    cut = dict(batch)
    for key in [key for key in ALONG if key in batch]:
        *rows, row = batch[key].shape
        if row % pieces:
            raise ValueError(
                f"{key} has rows of {row} tokens, which cannot be divided into {pieces} equal "
                "parts; pass a different row= to Rows"
            )
        cut[key] = batch[key].reshape(*rows, pieces, row // pieces)[..., own, :].reshape(*rows, -1)
    return cut
