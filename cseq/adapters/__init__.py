"""Other libraries' interfaces: a folder, or a module, for each library.

``torch``          `DataLoader`: torch's loader, its workers run by cseq
``returnn``        `MultiProcDataset`: a RETURNN dataset whose sequences are loaded by workers
``torchdata``      `MultiProcessingReadingService`: DataLoader2's data pipes, run by workers

``lightning``      `DataModule`; `Monitor`, which hands figures to the framework's loggers
``transformers``   `BatchTrainer`, `SaveState`, `Monitor`
``keras``          `Batches`, `SaveState`, `Monitor`
``composer``       `SaveState`, `Monitor`
``ignite``         `Monitor`
``prometheus``     `Collector`, for a registry of prometheus_client
``opentelemetry``  `instrument`, for readers of the metrics API
``figures``        what those that measure have in common

None is imported with cseq. Each needs its library, and an ImportError says how to install it. In
an adapter, ``import NAME`` imports the library of that name, not the adapter.
"""
