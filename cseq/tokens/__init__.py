"""Builds training rows for language models from tokenized documents.

::

    from cseq import tokens

    web = tokens.Megatron("web_text_document")                  # .idx and .bin
    code = tokens.Flat("code.bin", dtype="uint16", end=50256)   # or offsets=
    chat = tokens.Arrow(dataset, "input_ids", mask="assistant_masks")
    rows = tokens.Rows({"web": web, "code": code}, 8192, weights={"web": 3, "code": 1}, step=256)
    manager = cseq.MPSequence(rows, num_workers=2, batch_size=8, seed=7, shard=mesh["dp"],
                              out_type="cpu")
    with manager.start() as batches:
        for batch in batches:  # input_ids, labels, position_ids, document_ids, …
            ...
    rows.locate(12, seed=7)    # the pieces (source, document, start, stop) of a row

=================  =================================================================
`Documents`        the protocol for sources: ``lengths``, ``read``, ``name``, ``fingerprint``
`Megatron`         a pair of files in Megatron-LM's format
`Flat`             a flat array of tokens, split by offsets or an end-of-text token
`Arrow`            a list column of a table, Parquet files or a Hugging Face data set
`Rows`             an indexer that builds batches and defines the order
`split_context`    extracts a rank's part of a batch, for context parallelism
=================  =================================================================

A sample's index is the position of a piece's first token in the concatenation of all documents. A
piece extends to the end of the document or the row, whichever comes first.
"""

from cseq.tokens.arrow import Arrow
from cseq.tokens.context import split_context
from cseq.tokens.documents import Documents
from cseq.tokens.flat import Flat
from cseq.tokens.megatron import Megatron
from cseq.tokens.rows import Piece, Rows

__all__ = ["Arrow", "Documents", "Flat", "Megatron", "Piece", "Rows", "split_context"]
