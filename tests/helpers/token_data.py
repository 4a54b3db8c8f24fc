"""Corpora of tokens in the formats of Megatron and others, and the batches that they make."""

import json
import os
import struct
import subprocess
import sys

import numpy as np
from checkout import import_path

Tokens = list[int]
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def random_documents(rng, number, row):
    """Return documents of all lengths: some empty, some of one token, some as long as a row."""
    odd = np.array([0, 1, 2, row - 1, row, row + 1, 2 * row, 3 * row + 1])
    drawn = rng.geometric(2 / row, number)
    lengths = np.where(rng.random(number) < 0.4, rng.choice(odd, number), drawn)
    return [rng.integers(1, 30_000, length).tolist() for length in lengths]


def write_flat(path, documents, dtype="uint16"):
    """Write an array of all tokens; return the documents' starts, and the number of tokens."""
    tokens = np.array([token for document in documents for token in document], dtype)
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    return np.cumsum([0, *map(len, documents)])


def write_megatron(prefix, documents, dtype="uint16", bounds=None):
    """Write a pair of files; each document is one sequence unless `bounds` gives the sequences."""
    write_flat(prefix.with_suffix(".bin"), documents, dtype)
    lengths = np.array([*map(len, documents)], "<i4")
    starts = (lengths.cumsum(dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    ends = np.arange(len(documents) + 1) if bounds is None else np.array(bounds)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(documents), len(ends))
    parts = lengths.tobytes() + starts.astype("<i8").tobytes() + ends.astype("<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(head + parts)


def in_another_process(source, *args):
    """Run a script that leaves threads or files behind; return the JSON on its last line."""
    command = [sys.executable, "-W", "ignore", "-c", source, *map(str, args)]
    environment = os.environ | {"PYTHONPATH": import_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def documents_of(source):
    """Read all documents of a source."""
    return [source.read(k, 0, int(source.lengths[k])).tolist() for k in range(len(source))]


class Listed:
    """A user's object as a source: documents in lists, and masks if given."""

    def __init__(self, documents, masks=None):
        self.documents = documents
        self.lengths, self.name = np.array([*map(len, documents)]), "listed"
        self.fingerprint = len(documents)
        if masks is not None:
            self.mask = lambda document, start, stop: np.array(masks[document][start:stop], bool)

    def __len__(self):
        return len(self.documents)

    def read(self, document, start, stop):
        return np.array(self.documents[document][start:stop], np.int32)


def expected(rows, sources, row, masks=None, *, flat=False):
    """Make a batch of rows of pieces, token by token, with 0 as padding."""
    keys = ("input_ids", "labels", "position_ids", "document_ids")
    batch, shares = {"cu_seqlens": [0]} | {key: [] for key in keys}, dict.fromkeys(sources, 0)
    number = 0
    for pieces in rows:
        number = number if flat else 0
        used = 0
        for source, document, start, stop in pieces:
            tokens = sources[source][document]
            counted = masks[source][document] if masks else [1] * len(tokens)
            for at in range(start, stop):
                is_label = at + 1 < len(tokens) and counted[at + 1]
                values = (tokens[at], tokens[at + 1] if is_label else -100, at - start, number)
                for key, value in zip(keys, values, strict=True):
                    batch[key].append(value)
            number, used = number + 1, used + stop - start
            shares[source] += stop - start
            batch["cu_seqlens"].append(batch["cu_seqlens"][-1] + stop - start)
        if used < row:
            batch["cu_seqlens"].append(batch["cu_seqlens"][-1] + row - used)
            for at in range(row - used):
                for key, value in zip(keys, (0, -100, at, -1), strict=True):
                    batch[key].append(value)
    batch["max_seqlen"] = max(np.diff(batch["cu_seqlens"]).tolist())
    batch["valid_tokens"] = sum(label != -100 for label in batch["labels"])
    batch["source_tokens"] = [*shares.values()]
    shape = (1, -1) if flat else (len(rows), row)
    return batch | {key: np.array(batch[key]).reshape(shape).tolist() for key in keys}
