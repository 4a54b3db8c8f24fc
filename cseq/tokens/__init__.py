"""Documents of tokens in, training rows out, for language models.

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
`Documents`        what a source is: ``lengths``, ``read``, ``name``, ``fingerprint``
`Megatron`         a pair of files of Megatron-LM
`Flat`             an array in a file, documents by offsets or by an end-of-text token
`Arrow`            a column of lists: a table, Parquet files, a Hugging Face data set
`Rows`             an indexer with an order of its own: the batches
`split_context`    one rank's tokens of a batch, for context parallelism
=================  =================================================================

A sample's index is the position of a piece's first token in all documents, laid end to end; the
piece ends with its document, or with its row.
"""

from cseq.tokens.arrow import Arrow
from cseq.tokens.context import split_context
from cseq.tokens.documents import Documents
from cseq.tokens.flat import Flat
from cseq.tokens.megatron import Megatron
from cseq.tokens.rows import Piece, Rows

__all__ = ["Arrow", "Documents", "Flat", "Megatron", "Piece", "Rows", "split_context"]
