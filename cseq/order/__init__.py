"""Sample orders, sharding across ranks, and the training loop's position.

``sampler``     ★ divides an epoch's units into batches, and the batches among ranks
``_source``     ★ fills tickets with an epoch's samples
``shard``       this process's rank and the number of ranks
``place``       the current epoch, and the number of units consumed
``checkpoint``  creates and validates the contents of `state_dict`
``tally``       the number of tokens that a run has consumed from each source
``_readers``    permutations, order readers, and `DocumentEnds` (positions of contiguous documents)
``tables``      document tables shared by processes; `pieces` cuts documents into pieces
``base``        `Order`, the base class of custom orders and of the built-in orders in `shuffled`,
                `blocks`, `buckets`, `groups`, `mixture`, `packed`, `concatenated`, `balanced` and
                `weighted`, which build on `classes` and `_readers`; `shares` computes how many
                units come from each mixture source, and `sources` is the base of composite orders
"""
