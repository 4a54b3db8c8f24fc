"""Other libraries' interfaces, a folder for each, on cseq's engine.

``torch``      `DataLoader`: torch's loader, its workers run by cseq
``returnn``    `MultiProcDataset`: a RETURNN dataset whose sequences are loaded by workers
``torchdata``  `MultiProcessingReadingService`: DataLoader2's data pipes, run by workers

None is imported with cseq. Each needs its library, and an ImportError says how to install it. In
the folder of an adapter, ``import NAME`` imports the library of that name, not the folder.
"""
