"""Other libraries' interfaces, a folder for each, on cseq's engine.

``torch``      `DataLoader`: torch's loader, its workers run by cseq
``returnn``    `MultiProcDataset`: a RETURNN dataset whose sequences are loaded by workers
``torchdata``  `MultiProcessingReadingService`: DataLoader2's data pipes, run by workers

None is imported with cseq: each needs its library, and says which package brings it. A new adapter
is a folder with the library's name and a line above; in it, ``import NAME`` is the library.
"""
