"""The order of an epoch, this rank's share, and the loop's place.

``sampler``     ★ which indices, in which order, cut into batches
``_source``     ★ what an epoch asks for, ticket by ticket
``shard``       which rank this process is, and of how many
``place``       the epoch, and how many of its samples are done
``checkpoint``  `state_dict`, and what it must agree with
``tally``       how many tokens of each source a run has had
``_readers``    permutations; readers of orders; `DocumentEnds`: positions of documents end to end
``tables``      tables of documents that processes share; `pieces` of documents
``base``        `Order`, for orders of the user's own; `shuffled`, `blocks`, `buckets`, `groups`,
                `mixture`, `packed`, `concatenated`, `balanced` and `weighted` are cseq's, over what
                `classes` and `_readers` have; `shares`: how often each source of a mixture comes;
                `sources`: what orders that are made of others have in common
"""
