"""The readers of `cseq.tokens`: the files they read, and those they refuse."""

from __future__ import annotations

import json
import os
import pickle
import struct
from importlib.util import find_spec
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import token_data
from token_data import CODES, documents_of, in_another_process, write_flat, write_megatron

from cseq import tokens

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


@pytest.mark.parametrize("dtype", CODES)
def test_a_pair_of_megatron(tmp_path, dtype):
    """Each integer type is read, and documents may be empty."""
    write_megatron(tmp_path / "web", DOCUMENTS, dtype)
    for path in ("web", "web.idx", "web.bin"):
        source = tokens.Megatron(tmp_path / path)
        assert documents_of(source) == DOCUMENTS
        assert source.read(3, 1, 3).dtype == dtype
        assert (source.name, len(source)) == ("web", 4)


MEGATRON = """
import json, sys
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
folder, dtype, documents = *sys.argv[1:3], json.loads(sys.argv[3])
builder = IndexedDatasetBuilder(f"{folder}/theirs.bin", dtype=np.dtype(dtype).type)
for document in documents:
    builder.add_item(torch.tensor(document, dtype=torch.int64))
    builder.end_document()
builder.finalize(f"{folder}/theirs.idx")
ours = IndexedDataset(f"{folder}/ours")
print(json.dumps([ours[k].tolist() for k in range(len(ours))]))
"""


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("dtype", CODES)
def test_pairs_go_both_ways_with_megatron(tmp_path, dtype):
    """Files by megatron-core are read here, and files by these tests are read by megatron-core."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 100, rng.integers(0, 30)).tolist() for _ in range(40)]
    write_megatron(tmp_path / "ours", documents, dtype)
    assert in_another_process(MEGATRON, tmp_path, dtype, json.dumps(documents)) == documents
    source = tokens.Megatron(tmp_path / "theirs")
    assert documents_of(source) == documents
    assert source.read(0, 0, 0).dtype == dtype


def test_documents_of_several_sequences(tmp_path):
    """A document of Megatron's is the sequences between two bounds."""
    write_megatron(tmp_path / "web", DOCUMENTS, bounds=[0, 2, 2, 4])
    assert documents_of(tokens.Megatron(tmp_path / "web")) == [[1, 2, 3], [], [4, 5, 6, 7, 8]]


def test_flat_files(tmp_path):
    """A flat file is .npy or raw, with offsets in an array, a list or a file."""
    offsets = write_flat(tmp_path / "a.npy", DOCUMENTS)
    write_flat(tmp_path / "a.bin", DOCUMENTS, "uint32")
    np.save(tmp_path / "offsets.npy", offsets)
    for given in (offsets, offsets.tolist(), tmp_path / "offsets.npy"):
        assert documents_of(tokens.Flat(tmp_path / "a.npy", offsets=given)) == DOCUMENTS
        assert documents_of(tokens.Flat(tmp_path / "a.bin", "uint32", offsets=given)) == DOCUMENTS


@pytest.mark.parametrize("last", [[], [9, 9]])
def test_documents_by_their_last_token(tmp_path, last):
    """A document includes its end token; the last one may lack it."""
    documents = [[*each, 0] for each in DOCUMENTS] + [last] * bool(last)
    write_flat(tmp_path / "a.bin", documents)
    assert documents_of(tokens.Flat(tmp_path / "a.bin", "uint16", end=0)) == documents


@pytest.mark.needs("POSIX")
def test_documents_are_found_once(tmp_path):
    """A file stores their lengths until the tokens change; it is in `cache` if given."""
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    cache.mkdir()
    path = data / "a.bin"
    write_flat(path, [[1, 2, 0], [3, 0]])
    assert documents_of(tokens.Flat(path, "uint16", end=0)) == [[1, 2, 0], [3, 0]]
    [kept] = [name for name in os.listdir(data) if name != "a.bin"]
    before = os.stat(data / kept)
    assert documents_of(tokens.Flat(path, "uint16", end=0)) == [[1, 2, 0], [3, 0]]
    assert os.stat(data / kept).st_ino == before.st_ino
    assert documents_of(tokens.Flat(path, "uint16", end=2)) == [[1, 2], [0, 3, 0]]
    assert len(tokens.Flat(path, "uint8", end=0)) == 7
    write_flat(path, [[1, 0], [2, 3, 0], [4, 0]])
    os.utime(path, ns=(1, 1))
    assert documents_of(tokens.Flat(path, "uint16", end=0)) == [[1, 0], [2, 3, 0], [4, 0]]
    assert documents_of(tokens.Flat(path, "uint16", end=4, cache=cache))[1:] == [[0]]
    assert len(os.listdir(cache)) == 1


@pytest.mark.needs("POSIX")
def test_lengths_by_offsets_are_kept_in_a_cache(tmp_path):
    """With `cache` and a file of offsets, processes map the same lengths."""
    np.save(tmp_path / "offsets.npy", write_flat(tmp_path / "a.npy", DOCUMENTS))
    cache = tmp_path / "cache"
    cache.mkdir()
    given = {"offsets": tmp_path / "offsets.npy", "cache": cache}
    for _ in range(2):
        source = tokens.Flat(tmp_path / "a.npy", **given)
        assert documents_of(pickle.loads(pickle.dumps(source))) == DOCUMENTS
        assert len(os.listdir(cache)) == 1
    assert len(os.listdir(tmp_path)) == 3


def found(path):
    """Return the number of documents."""
    return len(tokens.Flat(path, "uint16", end=0))


@pytest.mark.needs("fork")
def test_processes_that_ask_at_once(tmp_path):
    """One finds the documents, the others wait; only the lengths remain."""
    write_flat(tmp_path / "a.bin", [[1] * 99 + [0]] * 1000)
    with get_context("fork").Pool(4) as pool:
        assert pool.map(found, [tmp_path / "a.bin"] * 4, 1) == [1000] * 4
        pool.close()
        pool.join()
    assert len(os.listdir(tmp_path)) == 2


def test_a_worker_s_copy_is_of_the_same_tokens(tmp_path):
    """A pickle opens the files again, whose tokens must not have changed."""
    write_megatron(tmp_path / "web", DOCUMENTS)
    offsets = write_flat(tmp_path / "a.npy", DOCUMENTS)
    flat = tokens.Flat(tmp_path / "a.npy", offsets=offsets)
    for source in (tokens.Megatron(tmp_path / "web"), flat):
        copy = pickle.loads(pickle.dumps(source))
        assert documents_of(copy) == DOCUMENTS
        assert (copy.fingerprint, copy.name) == (source.fingerprint, source.name)
    known = pickle.dumps(tokens.Megatron(tmp_path / "web"))
    write_megatron(tmp_path / "web", [[1, 2, 3], [], [4], [5, 6, 7, 9]])
    with pytest.raises(ValueError, match="tokens of web have changed since the run opened the f"):
        pickle.loads(known)


def test_fingerprints_differ_with_tokens(tmp_path):
    """Other tokens, or another division of as many tokens, are another corpus."""
    rng = np.random.default_rng(1)
    prints = set()
    for number in range(20):
        offsets = write_flat(tmp_path / f"{number}.npy", token_data.random_documents(rng, 20, 8))
        prints.add(tokens.Flat(tmp_path / f"{number}.npy", offsets=offsets).fingerprint)
    assert len(prints) == 20


def patched(at, data):
    """Return a function that overwrites some bytes of a file."""
    return lambda file: file[:at] + data + file[at + len(data) :]


# There are 4 sequences: lengths are at 34, offsets at 50, bounds at 82; the file has 122 bytes.
PAIRS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("idx", lambda file: b"", "web.idx at byte 0: the file does not start with"),
    ("idx", patched(0, b"X"), "web.idx at byte 0: the file does not start with"),
    ("idx", patched(9, b"\2"), "web.idx at byte 9: version 2 is not supported"),
    ("idx", patched(17, b"\6"), r"web.idx at byte 17: type code 6 \(float64\) is not an integer"),
    ("idx", patched(17, b"\7"), r"web.idx at byte 17: type code 7 \(float32\) is not an integer"),
    ("idx", patched(17, b"\x63"), r"type code 99 \(unknown\) is not an integer type"),
    ("idx", lambda file: file[:-8], "byte 114: .* ends, but 4 sequences and 5 bounds need 122"),
    ("idx", patched(38, struct.pack("<i", -1)), "web.idx at byte 38: sequence 1 has length -1"),
    ("idx", patched(58, struct.pack("<q", 2)), "byte 58: sequence 1 does not start where"),
    ("idx", patched(50, struct.pack("<q", 2)), "byte 50: sequence 0 starts at byte 2 of"),
    ("idx", patched(82, b"\1"), "byte 82: the document bounds do not run from 0 to 4"),
    ("idx", patched(114, b"\3"), "byte 82: the document bounds do not run from 0 to 4"),
    ("idx", patched(90, b"\4"), "byte 98: document 2 starts before the previous document"),
    ("bin", lambda file: file[:-1], "byte 15: the file has 15 bytes, but .*web.idx describes 16"),
    ("bin", lambda file: file + b"12", "byte 16: the file has 18 bytes, but .* describes 16"),
]


@pytest.mark.parametrize(("which", "damage", "said"), PAIRS)
def test_a_damaged_pair(tmp_path, which, damage, said):
    """A pair that contradicts itself is refused, with the file, the byte and the remedy."""
    write_megatron(tmp_path / "web", DOCUMENTS)
    path = tmp_path / f"web.{which}"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{said}.*; write the pair again"):
        tokens.Megatron(tmp_path / "web")


def test_half_a_pair(tmp_path):
    """The system's error names the missing file."""
    write_megatron(tmp_path / "web", DOCUMENTS)
    (tmp_path / "web.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"web\.bin"):
        tokens.Megatron(tmp_path / "web")


def test_sources_without_tokens(tmp_path):
    """A source must have a token, or be left out."""
    write_megatron(tmp_path / "a", [[], []])
    write_megatron(tmp_path / "b", [])
    write_flat(tmp_path / "c.npy", [[]])
    for make in (
        lambda: tokens.Megatron(tmp_path / "a"),
        lambda: tokens.Megatron(tmp_path / "b"),
        lambda: tokens.Flat(tmp_path / "c.npy", offsets=[0, 0]),
        lambda: tokens.Flat(tmp_path / "c.npy", end=0),
    ):
        with pytest.raises(ValueError, match="has no tokens; leave this source out"):
            make()


FLAT: list[tuple[str, dict[str, Any], str]] = [
    ("a.npy", {}, "a.npy needs either offsets or end"),
    ("a.npy", {"offsets": [0, 8], "end": 0}, "a.npy needs either offsets or end"),
    ("a.npy", {"offsets": [0, 3, 2, 8]}, r"offsets\[2\]=2 is below offsets\[1\]=3"),
    ("a.npy", {"offsets": [1, 8]}, r"offsets\[0\]=1 is not 0"),
    ("a.npy", {"offsets": [0, 3]}, r"offsets\[-1\]=3, but there are 8 tokens"),
    ("a.npy", {"offsets": [0.0, 8.0]}, r"a.npy: offsets=array\(\[0., 8.\]\) is malformed"),
    ("a.npy", {"offsets": [0]}, r"a.npy: offsets=array\(\[0\]\) is malformed"),
    ("a.npy", {"offsets": "other.npy"}, r"other.npy: offsets\[-1\]=3, but there are 8 tokens"),
    ("a.npy", {"end": 2**16}, "end=65536 is above 65535"),
    ("a.npy", {"end": -1}, "end=-1 is below 0"),
    ("a.npy", {"end": 0, "dtype": "uint32"}, "a.npy at byte 0: the tokens are uint16, not uint32"),
    ("a.npy", {"end": 9}, "a.npy: none of the 8 uint16 tokens is end=9; pass the token that"),
    ("a.bin", {"end": 0}, "a.bin is a raw file; pass its token type, such as dtype="),
    ("a.bin", {"end": 0, "dtype": "uint99"}, "dtype='uint99' is not a NumPy type"),
    ("empty.npy", {"end": 0}, "empty.npy at byte 0: .*; write it again with numpy.save"),
    ("a.bin", {"end": 0, "dtype": "uint32"}, "byte 12: the file ends inside a 4-byte token"),
    ("a.bin", {"end": 0, "dtype": "float16"}, "a.bin at byte 0: the values are float16"),
    ("two.npy", {"end": 0}, r"two.npy at byte 0: the array has shape \(2, 2\)"),
    ("cut.npy", {"end": 0}, "cut.npy at byte 0: .*; write it again with numpy.save"),
]


@pytest.mark.parametrize(("name", "given", "said"), FLAT)
def test_a_damaged_flat_file(tmp_path, monkeypatch, name, given, said):
    """A file that contradicts its description is refused, with both and the remedy."""
    monkeypatch.chdir(tmp_path)
    write_flat(tmp_path / "a.npy", DOCUMENTS)
    write_flat(tmp_path / "a.bin", [*DOCUMENTS[:-1], [5, 6, 7]])
    np.save("other.npy", [0, 3])
    np.save("two.npy", np.zeros((2, 2), int))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-1])
    (tmp_path / "empty.npy").touch()
    with pytest.raises((TypeError, ValueError), match=said):
        tokens.Flat(name, **given)


@pytest.mark.needs("POSIX")
def test_a_cache_that_is_no_folder(tmp_path):
    """The error names `cache`, and the file that could not be made."""
    write_flat(tmp_path / "a.bin", DOCUMENTS)
    with pytest.raises(OSError, match=r"as cache=.*a\.bin"):
        tokens.Flat(tmp_path / "a.bin", "uint16", end=0, cache=tmp_path / "a.bin")


def test_a_range_that_no_document_has(tmp_path):
    """Ranges outside of a document are not read."""
    write_megatron(tmp_path / "web", DOCUMENTS)
    with pytest.raises(IndexError, match=r"web: \[2, 4\) is out of range for the 3 tokens"):
        tokens.Megatron(tmp_path / "web").read(0, 2, 4)
