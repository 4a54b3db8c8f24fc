"""Training rows for a language model: 8 × 8192 tokens with labels, positions, document numbers."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import cseq
from harness.case import Case, Contender, Counter, Goal, scaled
from harness.usage import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROW, ROWS, END = scaled(8192, 256), 8, 50256
KEYS = ("input_ids", "labels", "position_ids", "document_ids")
DOCUMENTS, BATCHES = scaled(50_000, 400), scaled(400, 4)


class Corpus:
    """Documents with lognormal lengths (697 tokens on average) in a uint16 file."""

    def __init__(self, folder: str) -> None:
        rng = np.random.default_rng(1)
        lengths = rng.lognormal(np.log(700) - 0.72, 1.2, DOCUMENTS)
        lengths = np.clip(lengths, 2, scaled(60_000, 600)).astype(np.int64)
        self.offsets = np.append(0, lengths.cumsum())
        tokens = rng.integers(0, END, self.offsets[-1], dtype=np.uint16)
        tokens[self.offsets[1:] - 1] = END
        self.path = Path(folder, "tokens.bin")
        tokens.tofile(self.path)

    @property
    def tokens(self) -> np.ndarray:
        """Map the file."""
        return np.asarray(np.memmap(self.path, np.uint16, "r"))


def measured(loader: Iterable[Any], batches: int) -> Callable[[], float]:
    """Return a function that measures a round: CPU milliseconds of all processes per batch."""
    iterator = iter(loader)

    def run() -> float:
        before = cpu_seconds(os.getpid())
        for _ in range(batches):
            next(iterator)
        Counter.batches += batches
        return (cpu_seconds(os.getpid()) - before) / batches * 1e3

    return run


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a loader again and again."""
    while True:
        yield from loader


def ours(workers: int, packing: Any = "best-fit") -> Iterator[Callable[[], float]]:
    """`cseq.tokens`, in worker processes or in the loop's process."""
    from cseq import tokens

    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder)
        source = tokens.Flat(corpus.path, dtype="uint16", offsets=corpus.offsets)
        rows = tokens.Rows(source, ROW, packing=packing, keys=KEYS)
        manager = cseq.MPSequence(
            rows, batch_size=ROWS, num_workers=workers, seed=7, drop_last=True, repeat=True,
            out_type="null", dtype=None,
        )  # fmt: skip
        with manager.start() as batches:
            yield measured(batches, BATCHES)


def grain(threads: int | None, part: int) -> Iterator[Callable[[], float]]:
    """Grain's pipeline as torchtitan's sources of August 2026 build it: concatenated, and split.

    As in torchtitan, a Grain row is the whole batch. It has no document numbers.
    """
    import grain.python as grain
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder)
        tokens, offsets = corpus.tokens, corpus.offsets

        class Source:
            def __len__(self) -> int:
                return len(offsets) - 1

            def __getitem__(self, document: int) -> np.ndarray:
                return tokens[offsets[document] : offsets[document + 1]].astype(np.int64)

        def process(document: np.ndarray, _rng: Any) -> dict[str, np.ndarray]:
            positions = np.arange(len(document) - 1) % ROW
            return {"input_ids": document[:-1], "labels": document[1:], "positions": positions}

        def finish(packed: dict[str, np.ndarray]) -> Any:
            labels = packed["labels"].copy()
            labels[packed["input_ids_segment_ids"] == 0] = -100
            numbers = np.arange(len(labels))
            begins = np.where(packed["positions"] == 0, numbers, 0)
            return packed["input_ids"], labels, numbers - np.maximum.accumulate(begins)

        def collate(rows: Any) -> Any:
            parts = zip(*rows, strict=True)
            return [torch.cat([torch.as_tensor(each) for each in part]) for part in parts]

        options = grain.ReadOptions()
        if threads is not None:
            options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=50)
        dataset = grain.MapDataset.source(Source()).random_map(process, seed=7)
        dataset = dataset.filter(lambda found: len(found["labels"]) > 0).shuffle(seed=7).repeat()
        room = dict.fromkeys(("input_ids", "labels", "positions"), ROWS * ROW)
        dataset = grain.experimental.ConcatThenSplitIterDataset(
            dataset.to_iter_dataset(read_options=options), length_struct=room
        )
        dataset = dataset.filter(lambda found: bool((found["input_ids_segment_ids"] != 0).all()))
        dataset = dataset.map(finish).batch(1, drop_remainder=True, batch_fn=collate)
        loader = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2)
        yield measured(loader, max(1, BATCHES // part))


class Tokenizer:
    """The parts of a tokenizer that GPTDataset uses."""

    eod, pad, vocab_size = END, -1, END + 1
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "Tokenizer"}


def megatron() -> Iterator[Callable[[], float]]:
    """megatron-core's GPTDataset, with positions and losses per document.

    Versions for Python 3.12 mask documents, which is faster than resetting positions.
    """
    import logging

    import torch
    from megatron.core.datasets import gpt_dataset as gpt
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    fields = gpt.GPTDatasetConfig.__dataclass_fields__
    by_masks = "inter_document_masking" in fields
    given = {"inter_document_masking": True} if by_masks else {"reset_position_ids": True}
    given = {"reset_position_ids": False, "reset_attention_mask": False, **given}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder)
        prefix = Path(folder, "documents")
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for document in np.split(corpus.tokens.astype(np.int32), corpus.offsets[1:-1]):
            builder.add_document(torch.from_numpy(document), [len(document)])
        builder.finalize(f"{prefix}.idx")
        config = gpt.GPTDatasetConfig(
            random_seed=7, sequence_length=ROW, blend=([str(prefix)], None), split="100,0,0",
            path_to_cache=folder, tokenizer=Tokenizer(), eod_mask_loss=True,
            create_attention_mask=False, **given,
        )  # fmt: skip
        needed = [ROWS * BATCHES * 8, 0, 0]
        made = BlendedMegatronDatasetBuilder(gpt.GPTDataset, needed, lambda: True, config).build()
        yield measured(torch.utils.data.DataLoader(made[0], ROWS), BATCHES)


def trl(numpy_collator: bool) -> Iterator[Callable[[], float]]:
    """Rows that TRL packed in advance, with its collator, which needs no padding, or numpy's."""
    import datasets
    import pyarrow as pa
    import torch
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(folder)
        offsets, values = pa.array(corpus.offsets), pa.array(corpus.tokens.astype(np.int32))
        documents = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, values)})
        datasets.disable_progress_bars()
        rows = pack_dataset(datasets.Dataset(documents), ROW, "bfd_split")
        collate, part = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True), 20
        if numpy_collator:
            rows, collate, part = rows.with_format("numpy"), collate_columns, 1
        options = {"shuffle": True, "drop_last": True, "collate_fn": collate}
        loader = torch.utils.data.DataLoader(rows, ROWS, **options)
        yield measured(forever(loader), max(1, BATCHES // part))


def collate_columns(rows: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Make a batch of TRL's columns in numpy."""
    return collate_rows([(row["input_ids"], row["seq_lengths"]) for row in rows])


class PackedRows:
    """A data set of rows packed by hand in advance: the tokens and document lengths of each."""

    def __init__(self, folder: str) -> None:
        corpus = Corpus(folder)
        lengths = np.diff(corpus.offsets)
        whole = np.flatnonzero(lengths <= ROW)
        order = cseq.Packed(lengths[whole], ROW)
        samples, sizes = order.reader(7).samples(0, 0, order.units)
        rows = np.split(whole[samples], sizes.cumsum()[:-1])
        tokens, offsets = corpus.tokens, corpus.offsets
        self.lengths = [lengths[row] for row in rows]
        self.ends = np.append(0, np.cumsum([part.sum() for part in self.lengths]))
        self.path = Path(folder, "packed.bin")
        np.concatenate([tokens[offsets[d] : offsets[d + 1]] for r in rows for d in r]).tofile(
            self.path
        )
        self.tokens = np.asarray(np.memmap(self.path, np.uint16, "r"))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens[self.ends[row] : self.ends[row + 1]], self.lengths[row]


def collate_rows(rows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Make the same arrays, in numpy."""
    import torch

    shape = len(rows), ROW
    batch = {key: np.zeros(shape, np.int64) for key in KEYS}
    batch["labels"][:], batch["document_ids"][:] = -100, -1
    for r, (tokens, lengths) in enumerate(rows):
        size, ends = len(tokens), lengths.cumsum()
        batch["input_ids"][r, :size] = tokens
        batch["labels"][r, : size - 1] = tokens[1:]
        batch["labels"][r, ends - 1] = -100
        batch["position_ids"][r, :size] = np.arange(size) - np.repeat(ends - lengths, lengths)
        batch["document_ids"][r, :size] = np.repeat(np.arange(len(lengths)), lengths)
    return {key: torch.from_numpy(part) for key, part in batch.items()}


def by_hand(workers: int) -> Iterator[Callable[[], float]]:
    """A torch DataLoader over such rows."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        loader = torch.utils.data.DataLoader(
            PackedRows(folder), ROWS, shuffle=True, drop_last=True, num_workers=workers,
            collate_fn=collate_rows, persistent_workers=workers > 0,
        )  # fmt: skip
        yield measured(forever(loader), BATCHES)


def copied() -> Iterator[Callable[[], float]]:
    """Copy as many bytes as a batch has, from an array that no cache holds."""
    many = 64
    source = np.ones((many, ROWS * ROW * (3 * 8 + 4)), np.uint8)
    target = np.zeros_like(source[0])

    def copies() -> Iterator[None]:
        while True:
            for batch in source:
                target[:] = batch
                yield

    yield measured(copies(), BATCHES)


ONE, TWO, INLINE = "cseq.tokens, 1 worker", "cseq.tokens, 2 workers", "cseq.tokens, no worker"
CONCATENATED = "cseq.tokens, 1 worker, concatenated"
GRAIN, THREADS = "Grain as torchtitan builds it, 1 thread", "Grain as torchtitan builds it"
HAND = "numpy collator, torch's DataLoader"
HAND_ONE = f"{HAND}, 1 worker"
MEGATRON = "megatron-core's GPTDataset, documents known"
TRL = "TRL's packed rows and collator"
TRL_NUMPY = "TRL's packed rows, numpy collator"
LIMIT = "memcpy of the batch"

CASES = (
    Case(
        "tokens_rows",
        f"Rows for a language model: {ROWS} × {ROW} tokens, labels, positions, document numbers",
        "CPU ms/batch",
        (
            Contender(ONE, partial(ours, 1), ours=True),
            Contender(TWO, partial(ours, 2)),
            Contender(INLINE, partial(ours, 0)),
            Contender(CONCATENATED, partial(ours, 1, "concatenate")),
            Contender(GRAIN, partial(grain, 1, 10), ("grain", "torch")),
            Contender(THREADS, partial(grain, None, 20), ("grain", "torch")),
            Contender(MEGATRON, megatron, ("megatron-core", "torch")),
            Contender(TRL, partial(trl, False), ("trl", "datasets", "torch")),
            Contender(TRL_NUMPY, partial(trl, True), ("trl", "datasets", "torch")),
            Contender(HAND, partial(by_hand, 0), ("torch",)),
            Contender(HAND_ONE, partial(by_hand, 1), ("torch",)),
            Contender(LIMIT, copied),
        ),
        limit=LIMIT,
        goals=(
            Goal("CPU ms a batch, one worker", lambda f: f[ONE], 0.35),
            Goal("Grain, one thread, over ours", lambda f: f[GRAIN] / f[ONE], at_least=20),
            Goal("megatron-core over ours", lambda f: f[MEGATRON] / f[ONE], at_least=5),
            Goal("TRL over ours", lambda f: f[TRL] / f[ONE], at_least=20),
            Goal(
                "TRL with a numpy collator over ours", lambda f: f[TRL_NUMPY] / f[ONE], at_least=2
            ),
            Goal(
                "numpy collator over ours, a worker each",
                lambda f: f[HAND_ONE] / f[ONE],
                at_least=2,
            ),
        ),
    ),
)
