"""How a batch, an exception or the user's worker travels to another process.

``transport``    ★ the two ends of a hand-over: as an object, or through a slot
``_codec``       ★ in C: writes batches into slots or leaves them in cells, and reads them
``_room``        the slot that a batch is written into: how it grows, what it lends
``survey``       the structure of a batch: the Python part of ``_codec``
``codec``        the layout of a batch in a slot; its leaves, one by one
``_plan``        the structure that batches have in common
``partial``      a batch without the samples that raised
``failure``      an exception, packed in a worker and raised in the loop
``pickling``     objects as bytes: by reference, or by value for new processes
"""
