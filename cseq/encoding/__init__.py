"""Transfer of batches, exceptions and the user's worker to another process.

``transport``    ★ both ends of a transfer, which uses objects or slots
``_codec``       ★ the C part: writes batches to slots or cells, and reads them
``_room``        the slot that a batch is written to, with its growth and loans
``survey``       the structure of a batch; the Python part of ``_codec``
``codec``        the layout of a batch in a slot; functions on single leaves
``_plan``        the structure that batches share
``failure``      exceptions, packed in a worker and raised in the loop
``pickling``     serialization by reference, or by value for new processes
"""
