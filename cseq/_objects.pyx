# cython: language_level=3, freethreading_compatible=True
"""Where threads leave their batches."""

cimport cython


@cython.final
cdef class ObjectTable:
    """An object for each cell of a ring, or None: that of the party that may write the cell.

    A list for the garbage collector, whose length never changes. The core reads and exchanges its
    items without the list's own lock and without counting references to the list, which both sides
    would write for every batch. For the same reason the items of two cells do not share a cache line.

    Parameters
    ----------
    cells : int
    """

    def __cinit__(self, Py_ssize_t cells):
        self.cells = cells
        self.held = [None] * (STRIDE * cells)
        self.items = cseq_items(self.held)

    cdef int check(self, Py_ssize_t cell) except -1:
        if cell < 0 or cell >= self.cells:
            raise IndexError(f"cell {cell} is not one of {self.cells}")
        return 0

    def __len__(self):
        return self.cells

    def __getitem__(self, Py_ssize_t cell):
        self.check(cell)
        return self.get(cell)

    def __setitem__(self, Py_ssize_t cell, value):
        self.check(cell)
        self.put(cell, value)
