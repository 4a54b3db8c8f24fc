"""The order of an epoch, this rank's share of it, and the loop's place in it.

``sampler``     ★ which indices, in which order, cut into batches
``_source``     ★ what an epoch asks for, ticket by ticket
``shard``       which rank this process is, and of how many
``place``       the epoch, and how many of its samples are done
``checkpoint``  `state_dict`, and what it must agree with
``documents``   `DocumentEnds`: documents end to end, positions of their tokens; `pieces` of them;
                `tables` of them that processes share
``base``        `Order`, for orders of the user's own; `shuffled`, `blocks`, `buckets`, `groups`,
                `mixture`, `packed`, `concatenated`, `balanced` and `weighted` are cseq's, over what
                `classes` and `_readers` have; `shares`: how often each source of a mixture comes;
                `sources`: what orders that are made of others have in common
"""
