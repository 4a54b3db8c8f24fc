"""Transfers batches, exceptions and the user's worker to another process.

``transport``    ★ both ends of a transfer, through objects or slots
``_codec``       ★ the C part, which writes batches to slots or cells and reads them back
``_room``        the slot that a batch is written to
``survey``       finds the structure of a batch; the Python part of ``_codec``
``codec``        the layout of a batch in a slot, and functions for single leaves
``_plan``        the structure that several batches have in common
``failure``      packs exceptions in a worker, to be raised in the loop
``pickling``     serializes objects by reference, or by value for new processes
"""
