"""How a batch, an exception or the user's worker travels to another process.

``transport``    ★ the two ends of a hand-over: as an object, or through a slot
``_codec``       ★ writes batches into slots, or leaves them in cells; and reads them, in C
``_room``        the slot that a batch is written into: how it grows, what is lent of it
``survey``       what a batch consists of: the Python of ``_codec``
``codec``        how a batch lies in a slot; its leaves, one by one
``_plan``        what batches of one structure have in common
``partial``      a batch of which samples were left out
``failure``      an exception, packed in a worker and raised in the loop
``pickling``     objects as bytes: by reference, or by value for new processes
"""
