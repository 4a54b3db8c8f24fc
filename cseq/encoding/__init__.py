"""How a batch, an exception or the user's worker travels to another process.

``transport``    ★ the two ends of a hand-over: as an object, or through a slot
``writer``       ★ a worker's end of the slots
``codec``        encodes a batch into a slot, and decodes it; ``_codec``, the part in C
``_plan``        what batches of one structure have in common
``partial``      a batch of which samples were left out
``failure``      an exception, packed in a worker and raised in the loop
``pickling``     objects as bytes: by reference, or by value for new processes
"""
