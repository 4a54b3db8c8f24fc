"""The order of an epoch, this rank's share of it and the training loop's position.

``sampler``     ★ the indices of an epoch in order, cut into batches
``_source``     ★ the contents of an epoch's tickets
``shard``       this process's rank and the number of ranks
``place``       the current epoch and the number of samples consumed
``checkpoint``  the contents and validation of `state_dict`
``tally``       the tokens of each source that a run has consumed
``_readers``    permutations; readers of orders; `DocumentEnds`, positions of contiguous documents
``tables``      document tables that processes share; `pieces` of documents
``base``        `Order`, the base class of custom orders and of the built-in orders in `shuffled`,
                `blocks`, `buckets`, `groups`, `mixture`, `packed`, `concatenated`, `balanced` and
                `weighted`, which build on `classes` and `_readers`; `shares` has the counts of a
                mixture's sources, `sources` the common base of orders that combine others
"""
