"""Documents of tokens in, training rows out, for language models.

================  ==========================================================================
`Documents`       what a source is: ``lengths``, ``read``, ``name``, ``fingerprint``
`Megatron`        a pair of files of Megatron-LM
`Flat`            an array in a file, documents by offsets or by the token that ends them
`Arrow`           a column of lists: a table, Parquet files, a Hugging Face data set
================  ==========================================================================
"""

from cseq.tokens.arrow import Arrow
from cseq.tokens.documents import Documents
from cseq.tokens.flat import Flat
from cseq.tokens.megatron import Megatron

__all__ = ["Arrow", "Documents", "Flat", "Megatron"]
