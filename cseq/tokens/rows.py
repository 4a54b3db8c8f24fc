"""Builds the rows of batches from pieces of documents."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from cseq.check import choice, flag, integer
from cseq.indexing.context import empty, parts
from cseq.order._readers import gather, locate
from cseq.order.balanced import Balanced
from cseq.order.base import MOST_SEED
from cseq.order.concatenated import Concatenated
from cseq.order.mixture import Mixture
from cseq.order.packed import Packed
from cseq.tokens._fill import cut, fill
from cseq.tokens.documents import Given, corpus_of, data_type

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray

    from cseq.order._readers import DocumentEnds
    from cseq.order.base import Ints, Order
    from cseq.order.mixture import Weights
    from cseq.tokens.documents import Corpus, Documents

# The row length is limited because `cu_seqlens` is int32.
MOST_ROW = 2**30
KEYS = ("input_ids", "labels", "position_ids", "document_ids", "valid_tokens", "source_tokens")
ALL = (*KEYS, "cu_seqlens", "max_seqlen")


class Piece(NamedTuple):
    """Tokens [start, stop) of a document.

    Attributes
    ----------
    source : str
        The name of the source.
    document, start, stop : int
    """

    source: str
    document: int
    start: int
    stop: int


class Rows:
    """An indexer that makes rows of tokens and defines their order. Pass it to `MPSequence`.

    A row is a sequence of *pieces* of documents. Documents are split if they are longer than a row
    or, with 'concatenate', at the end of a row. Without `weights`, every token occurs once per
    epoch, but 'concatenate' drops an incomplete last row.

    Parameters
    ----------
    sources : Documents or dict of str to Documents
        `Megatron`, `Flat`, `Arrow` or custom `Documents`. Several sources form one corpus.
    row : int
        The number of tokens in a row (at least 2).
    weights : dict of str to number, or list of (int, dict), optional
        The share of each source, as in `Mixture`. By default, an epoch contains each source once.
    weights_of : 'tokens' or 'units'
        Whether the weights are shares of tokens or of units (rows).
    packing : 'best-fit' or 'concatenate'
        Whether to use `Packed` or `Concatenated`.
    step : int, optional
        The number of rows in an optimizer step, over all ranks and microbatches. If set, `Balanced`
        gives all ranks nearly equal work. The order depends on `step`, so keep it the same if the
        number of ranks changes.
    balance : 'step', 'window' or 'epoch'
        Whether `Balanced` exchanges rows within a step, within 16 steps, or across the epoch.
    cache : str or path, optional
        A local folder for tables that all processes on a machine share.
    epoch_size : int, optional
        The number of rows in an epoch. Requires `weights`.
    flat : bool
        Whether to join the rows of a batch into a single row of shape (1, rows * row).
    pad : int
        The padding token.
    dtype : 'int64' or 'int32'
        The data type of `input_ids`, `labels` and `position_ids`.
    keys : sequence of str
        The entries of a batch:

        - ``input_ids``: shape (rows, row).
        - ``labels``: the next token in the document. It is -100 at the end of a document, in
          padding, and where a loss mask excludes the next token.
        - ``position_ids``: positions, starting at 0 in each piece and in padding.
        - ``document_ids``: int32, the index of the piece in the row, or -1 in padding.
        - ``cu_seqlens``: int32, shape (pieces + 1,): the start of each piece or padding in the
          batch, and the end of the last one. Used for varlen attention over the batch as one row.
        - ``max_seqlen``: int, the length of the longest piece.
        - ``valid_tokens``: int, the number of labels that are not -100.
        - ``source_tokens``: int64, shape (sources,): the number of tokens from each source.

    Attributes
    ----------
    names : list of str
        The names of the sources.
    fingerprints : dict of str to int
        The fingerprints of the sources, as saved in states.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, or if there is no token to predict.

    Examples
    --------
    >>> from cseq import tokens
    >>> np.save("notes.npy", np.arange(10, dtype="uint16"))
    >>> notes = tokens.Flat("notes.npy", offsets=[0, 7, 10])
    >>> rows = tokens.Rows(notes, 5, keys=["input_ids", "labels"])
    >>> manager = cseq.MPSequence(rows, batch_size=2, num_workers=0, seed=1, out_type="null")
    >>> with manager.start() as batches:
    ...     for batch in batches:
    ...         print(batch["input_ids"].tolist(), batch["labels"].tolist())
    [[0, 1, 2, 3, 4], [7, 8, 9, 5, 6]] [[1, 2, 3, 4, 5], [8, 9, -100, 6, -100]]
    """

    def __init__(
        self,
        sources: Documents | Mapping[str, Documents],
        row: int,
        weights: Weights | Sequence[tuple[int, Weights]] | None = None,
        *,
        weights_of: Literal["tokens", "units"] = "tokens",
        packing: Literal["best-fit", "concatenate"] = "best-fit",
        step: int | None = None,
        balance: Literal["step", "window", "epoch"] = "step",
        cache: str | os.PathLike[str] | None = None,
        epoch_size: int | None = None,
        flat: bool = False,
        pad: int = 0,
        dtype: DTypeLike = "int64",
        keys: Sequence[str] = KEYS,
    ) -> None:
        named = sources if isinstance(sources, Mapping) else {"": sources}
        if not named:
            raise ValueError("sources={} is empty; pass at least one source")
        corpora = [corpus_of(source) for source in named.values()]
        self.names = [*named] if isinstance(sources, Mapping) else [corpora[0].name]
        self.row = integer("row", row, 2, MOST_ROW)
        self.flat = flag("flat", flat)
        if isinstance(keys, str) or not keys:
            raise ValueError(f"keys={keys!r} is not a list of keys; pass at least one key")
        self.keys = tuple(choice("keys", key, ALL) for key in keys)
        self._dtype = data_type(dtype)
        self._pad = integer("pad", pad, 0)
        self._check(corpora)
        prints = [corpus.fingerprint for corpus in corpora]
        self.fingerprints = dict(zip(named, prints, strict=True))
        self._corpora = corpora
        self._firsts = np.cumsum([0, *(corpus.tokens for corpus in corpora)])
        firsts = zip(self._firsts.tolist(), corpora, strict=False)
        self._part_firsts = np.concatenate([first + corpus.firsts for first, corpus in firsts])
        choice("packing", packing, ("best-fit", "concatenate"))
        choice("balance", balance, ("step", "window", "epoch"))
        if weights is None and epoch_size is not None:
            raise ValueError(f"epoch_size={epoch_size} needs weights; pass weights as well")
        if step is None and balance != "step":
            raise ValueError(f"balance={balance!r} needs step; pass step as well")
        self._mixed = None if weights is None else (weights, weights_of, epoch_size)
        self._packs, self._cache = packing == "best-fit", cache
        self._dealt = step, balance
        self.order  # noqa: B018 - raises its errors early

    @cached_property
    def order(self) -> Order:
        """The order for ``MPSequence(rows)``. Its samples are tokens, and its units are rows."""
        over: Callable[[Any], Order] = partial(Concatenated, row=self.row, cache=self._cache)
        if self._packs:
            over = partial(Packed, budget=self.row, too_long="split", cache=self._cache)
        lengths = [corpus.lengths for corpus in self._corpora]
        if self._mixed is None:
            order = over(lengths[0] if len(lengths) == 1 else np.concatenate(lengths))
        else:
            weights, of, size = self._mixed
            sources = dict(zip(self.names, map(over, lengths), strict=True))
            order = Mixture(sources, weights, weights_of=of, epoch_size=size)
        step, balance = self._dealt
        return order if step is None else Balanced(order, step, over=balance, cache=self._cache)

    def _check(self, corpora: list[Corpus]) -> None:
        """Check that the tokens fit the data type, and that there is a token to predict."""
        if self._dtype not in (np.int32, np.int64) or self._pad > np.iinfo(self._dtype).max:
            raise TypeError(
                f"dtype={self._dtype} does not work with pad={self._pad}; pass dtype='int64' or "
                "'int32', and a pad token that fits this type"
            )
        for corpus in corpora:
            parts = corpus.parts
            if isinstance(corpus, Given):
                parts = [corpus.read(int(corpus.ends.find(np.zeros(1, np.int64))[0][0]), 0, 1)]
            kind = np.result_type(*{part.dtype for part in parts})
            if not np.can_cast(kind, self._dtype):
                fits = np.can_cast(kind, np.int64)
                remedy = "pass dtype='int64'" if fits else "store the tokens in a smaller type"
                raise TypeError(
                    f"{corpus.name} has tokens of type {kind}, which dtype={self._dtype} cannot "
                    f"hold; {remedy}"
                )
        if "labels" in self.keys and max(int(corpus.lengths.max()) for corpus in corpora) < 2:
            raise ValueError(
                "no document has at least 2 tokens, so there is no next token to predict; pass "
                "longer documents"
            )

    def __repr__(self) -> str:
        return f"<Rows of {self.row} tokens of {', '.join(self.names)}: {self.order!r}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached properties, such as memory-mapped arrays."""
        made = ("order", "_ends", "_arrays")
        return {name: value for name, value in vars(self).items() if name not in made}

    def locate(self, row: int, *, seed: int, epoch: int = 0) -> list[Piece]:
        """Return the pieces of a row.

        Parameters
        ----------
        row : int
            The index of the row in the epoch, over all ranks.
        seed, epoch : int
            The seed and the epoch, in [0, 2**64).

        Raises
        ------
        IndexError
            If the epoch has no such row.

        Examples
        --------
        >>> np.save("notes.npy", np.arange(10, dtype="uint16"))
        >>> notes = tokens.Flat("notes.npy", offsets=[0, 7, 10])
        >>> tokens.Rows(notes, 12).locate(0, seed=1)
        [Piece(source='notes', document=0, start=0, stop=7),
         Piece(source='notes', document=1, start=0, stop=3)]
        """
        if integer("row", row, 0) >= self.order.units:
            raise IndexError(f"row={row} is out of range for an epoch of {self.order.units} rows")
        reader = self.order.reader(integer("seed", seed, 0, MOST_SEED))
        indices, sizes = reader.samples(integer("epoch", epoch, 0, MOST_SEED), row, 1)
        pieces, _ = self._locate(np.asarray(indices, np.int64), sizes)
        columns = zip(*pieces.tolist(), strict=True)
        return [Piece(self.names[s], k, start, start + n) for s, k, start, n in columns]

    def token_sums(self, order: Order, seed: int) -> Callable[[int, Ints], dict[str, int]]:
        """Return a function that counts each source's tokens in the given units of an epoch."""
        known, reader = order.token_sums(seed), order.reader(seed)

        def sums(epoch: int, units: Ints) -> dict[str, int]:
            found = [] if known is None else known(epoch, units)
            if len(found) != len(self.names):
                indices, sizes = gather(reader, epoch, units)
                sizes = np.ones_like(indices) if sizes is None else sizes
                found = self._by_source(self._locate(indices, sizes)[0]).tolist()
            return dict(zip(self.names, found, strict=True))

        return sums

    def _by_source(self, pieces: Ints) -> Ints:
        sources, *_, counts = pieces
        return np.bincount(sources, counts, len(self.names)).astype(np.int64)

    def only(self, keys: Sequence[str]) -> Rows:
        """Return a copy with different keys."""
        rows = object.__new__(type(self))
        vars(rows).update(vars(self), keys=tuple(keys))
        return rows

    def __getitem__(self, indices: Ints) -> dict[str, Any]:
        """Make a batch of the pieces that start at the positions `indices`; see `cseq.parts`."""
        sizes = parts()
        pieces, cuts = self._locate(indices, sizes)
        shape = (1, len(sizes) * self.row) if self.flat else (len(sizes), self.row)
        kinds = dict.fromkeys(("input_ids", "labels", "position_ids"), self._dtype)
        kinds["document_ids"] = np.dtype(np.int32)
        needed = {*self.keys, "input_ids", "labels" if "valid_tokens" in self.keys else ""}
        batch: dict[str, Any] = {
            key: empty(shape, kind) if key in needed else None for key, kind in kinds.items()
        }
        found = self._find(indices, pieces, cuts)
        batch["valid_tokens"] = fill(*found, cuts, self._pad, *batch.values())
        lengths = cuts[0]
        if "cu_seqlens" in self.keys:
            batch["cu_seqlens"] = np.append(0, lengths.cumsum()).astype(np.int32)
        if "max_seqlen" in self.keys:
            batch["max_seqlen"] = int(lengths.max())
        if "source_tokens" in self.keys:
            batch["source_tokens"] = self._by_source(pieces)
        return {key: batch[key] for key in self.keys}

    @cached_property
    def _ends(self) -> list[DocumentEnds]:
        return [corpus.ends for corpus in self._corpora]

    @cached_property
    def _arrays(self) -> tuple[list[NDArray[Any]], list[NDArray[Any] | None]]:
        parts = [part for corpus in self._corpora for part in corpus.parts]
        return parts, [mask for corpus in self._corpora for mask in corpus.masks]

    def _locate(self, indices: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """Find the pieces at the given positions.

        Return the source, document, start and length of each piece, and the result of `cut`.
        """
        pieces = locate(self._ends, self._firsts, indices)
        return pieces, cut(pieces[3], sizes, self.row, not self.flat)

    def _find(
        self, indices: Ints, pieces: Ints, cuts: Ints
    ) -> tuple[list[NDArray[Any]], list[NDArray[Any] | None], Ints, Ints]:
        """Return the token arrays, the masks, and the array index and position of each piece.

        If a piece of a custom source is cut, the token after it is also read, as its last label.
        """
        owners = self._part_firsts.searchsorted(indices, "right") - 1
        starts = indices - self._part_firsts.take(owners)
        arrays, masks = self._arrays
        if any(isinstance(corpus, Given) for corpus in self._corpora):
            arrays, masks = [*arrays], [*masks]
            is_cut = cuts[1][cuts[2] >= 0].tolist()
            for k, (s, document, start, count) in enumerate(pieces.T.tolist()):
                corpus = self._corpora[s]
                if isinstance(corpus, Given):
                    owners[k], starts[k] = len(arrays), 0
                    piece = document, start, start + count + is_cut[k]
                    arrays.append(corpus.read(*piece))
                    masks.append(corpus.mask(*piece))
        return arrays, masks, owners, starts
