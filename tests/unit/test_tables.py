"""Tables in a file of the machine: one process makes it, all map it, and damage is noticed."""

import copy
import os
import pickle
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from checkout import import_path

import cseq
from cseq.files import locked
from cseq.order._readers import digest, fingerprint
from cseq.order.tables import tables

pytestmark = pytest.mark.needs("POSIX")

LENGTHS = np.arange(5000) * 7919 % 300
KINDS = {
    "packed": lambda lengths, **options: cseq.Packed(lengths, 256, too_long="split", **options),
    "concatenated": lambda lengths, **options: cseq.Concatenated(lengths, 256, **options),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def files(folder):
    """Return the names of a folder's files."""
    return [path.name for path in folder.iterdir()]


def flipped(data):
    """Flip a bit in the middle of a table."""
    at = len(data) // 3 * 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


DAMAGED = {
    "cut": lambda data: data[:-100],
    "flipped": flipped,
    "without a page, as after a power failure": lambda data: bytes(4096) + data[4096:],
    "empty": lambda data: b"",
    "another program's": lambda data: b"PK" * 5000,
}


@every_kind
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_made_again(kind, damage, tmp_path):
    """It is never read: the order and the files are as before, which serve lengths of any type."""
    folder = tmp_path / "new" / "folder"
    expected = KINDS[kind](LENGTHS, cache=folder).batches(seed=3)
    content = {path: path.read_bytes() for path in folder.iterdir()}
    for path, data in content.items():
        path.write_bytes(DAMAGED[damage](data))
    assert KINDS[kind](LENGTHS, cache=folder).batches(seed=3) == expected
    assert {path: path.read_bytes() for path in folder.iterdir()} == content
    again = KINDS[kind](LENGTHS.astype(np.int32), cache=str(folder))
    assert (again.batches(seed=3), repr(again)) == (expected, repr(KINDS[kind](LENGTHS)))
    assert {path: path.read_bytes() for path in folder.iterdir()} == content


@every_kind
def test_a_file_of_other_documents(kind, tmp_path):
    """It has another name; a renamed one is made again."""
    KINDS[kind](LENGTHS + 1, cache=tmp_path).batches(seed=3)
    others = sorted(tmp_path.iterdir())
    expected = KINDS[kind](LENGTHS, cache=tmp_path).batches(seed=3)
    ours = sorted({*tmp_path.iterdir()} - {*others})
    assert len(ours) == len(others)
    for path, theirs in zip(ours, others, strict=True):
        path.write_bytes(theirs.read_bytes())
    assert KINDS[kind](LENGTHS, cache=tmp_path).batches(seed=3) == expected


def test_epochs_that_are_over_are_removed(tmp_path):
    """The files of the last two are kept, as ranks may be in either."""
    order = cseq.Concatenated(LENGTHS, 256, cache=tmp_path)
    reader = order.reader(3)
    for epoch in range(5):
        reader.samples(epoch, 0, 1)
    order.reader(4).samples(0, 0, 1)
    numbers = sorted(name.rpartition("-")[2] for name in files(tmp_path) if name.count("-") == 5)
    assert numbers == ["0", "3", "4"]


@every_kind
def test_a_pickle_names_the_files(kind, tmp_path):
    """It has nothing for each document, and gives the same order; so do copies."""
    plain = cseq.Balanced(KINDS[kind](LENGTHS), 12, over="epoch")
    np.save(tmp_path / "lengths.npy", LENGTHS)
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    for lengths in (LENGTHS, mapped, np.asarray(mapped)[:]):
        cache = tmp_path / type(lengths).__name__
        order = cseq.Balanced(KINDS[kind](lengths, cache=cache), 12, over="epoch", cache=cache)
        expected = plain.batches(4, seed=3)
        assert order.batches(4, seed=3) == expected
        data = pickle.dumps(order)
        assert len(data) < 2000 < len(LENGTHS)
        again = pickle.loads(data)
        assert again.batches(4, seed=3) == expected
        assert copy.deepcopy(order).facts() == plain.facts() == again.facts()
    assert any(name.startswith("lengths-") for name in files(tmp_path / "ndarray"))
    assert not any(name.startswith("lengths-") for name in files(tmp_path / "memmap"))


def test_a_pickle_of_other_lengths(tmp_path):
    """The order of a file that has changed is refused, with its name."""
    np.save(tmp_path / "lengths.npy", LENGTHS)
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    data = pickle.dumps(cseq.Concatenated(mapped, 256, cache=tmp_path))
    np.save(tmp_path / "lengths.npy", LENGTHS + 1)
    with pytest.raises(ValueError, match=r"lengths in .*lengths\.npy have changed since"):
        pickle.loads(data)


def test_what_cannot_be_made_leaves_no_file(tmp_path):
    """An exception is raised unchanged, and the next order can make the file."""

    def fail(new):
        new("part", 9, np.int64)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tables(str(tmp_path), "name", fail)
    assert not files(tmp_path)
    with pytest.raises(ValueError, match="all lengths are 0"):
        cseq.Packed([0, 0], 5, too_long="split", cache=tmp_path)
    found = tables(str(tmp_path), "name", lambda new: new("part", 9, np.int64).fill(7))
    assert found["part"].tolist() == [7] * 9
    assert not found["part"].flags.writeable


def test_a_folder_that_is_none(tmp_path):
    """The error names the file, or the argument."""
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        cseq.Concatenated(LENGTHS, 256, cache=tmp_path / "file")
    with pytest.raises(TypeError, match="cache=7 is not a path"):
        cseq.Concatenated(LENGTHS, 256, cache=7)
    with pytest.raises(ValueError, match="is valid only with too_long='split'"):
        cseq.Packed(LENGTHS + 1, 400, cache=tmp_path)


@every_kind
@pytest.mark.parametrize("over", ["", "step", "window", "epoch"])
def test_a_rank_keeps_nothing_for_each_document(kind, over, tmp_path):
    """With the file, reading rows takes no memory for each of 10^6 documents."""
    lengths = np.random.default_rng(0).integers(0, 400, 10**6, np.int32)

    def begin():
        order = KINDS[kind](lengths, cache=tmp_path)
        order = cseq.Balanced(order, 64, over=over, cache=tmp_path) if over else order
        reader = order.reader(1)
        reader.samples(0, 0, 8)
        return reader

    begin()
    tracemalloc.start()
    try:
        reader = begin()
        for number in range(0, 4000, 8):
            reader.samples(0, number, 8)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Without files, these would be 4.5 and 0.8 MB.
    assert kept < {"packed": 2_000_000, "concatenated": 500_000}[kind]
    assert peak < 40_000_000


MAKE = """
import sys
import numpy as np
from cseq.order.tables import tables
def make(new):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    new("numbers", 300_000, np.int64)[:] = np.arange(300_000)
    if len(sys.argv) > 3:
        print("making", flush=True)
        sys.stdin.read()
found = tables(sys.argv[1], "shared", make)
assert (found["numbers"] == np.arange(300_000)).all()
"""


def start(*arguments):
    """Start a process that requests the tables."""
    return subprocess.Popen(
        [sys.executable, "-c", MAKE, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": import_path()},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_one_process_makes_what_all_map(tmp_path):
    """Of four that begin together, one makes the file, and all have the same one."""
    each = [start(tmp_path / "cache", tmp_path / "log") for _ in range(4)]
    for process in each:
        process.communicate(timeout=60)
    assert [process.returncode for process in each] == [0] * 4
    assert (tmp_path / "log").read_text() == "made\n"
    assert files(tmp_path / "cache") == ["shared"]


def test_a_process_that_comes_late_leaves_no_part(tmp_path, monkeypatch):
    """Another process finishes the file between the first look and the lock."""

    def make(new):
        new("part", 9, np.int64).fill(7)

    def late(path):
        monkeypatch.undo()
        tables(str(tmp_path), "name", make)
        return locked(path)

    monkeypatch.setattr("cseq.order.tables.locked", late)
    assert tables(str(tmp_path), "name", pytest.fail)["part"].tolist() == [7] * 9
    assert files(tmp_path) == ["name"]


def test_a_process_that_is_killed_is_followed_by_another(tmp_path):
    """While it makes the file, others wait; its part never counts as the whole."""
    first = start(tmp_path / "cache", tmp_path / "log", "hold")
    assert first.stdout.readline() == "making\n"
    others = [start(tmp_path / "cache", tmp_path / "log") for _ in range(2)]
    first.kill()
    first.communicate(timeout=60)
    for process in others:
        process.communicate(timeout=60)
    assert [process.returncode for process in others] == [0, 0]
    assert (tmp_path / "log").read_text() == "made\n" * 2
    assert files(tmp_path / "cache") == ["shared"]


OPEN = """
import pickle, sys
def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon"))
import numpy, cseq.order.balanced, cseq.order.packed, cseq.order.concatenated
data = open(sys.argv[1], "rb").read()
before = anonymous()
reader = pickle.loads(data).reader(1)
for number in range(0, 4000, 8):
    reader.samples(0, number, 8)
print(anonymous() - before, flush=True)
"""


@pytest.mark.needs("Linux")
@every_kind
@pytest.mark.parametrize("over", ["step", "epoch"])
def test_a_process_with_a_pickle_has_the_files_of_all(kind, over, run_anew, tmp_path):
    """Its own memory does not grow with documents, whose lengths are 16 MB here."""
    lengths = np.random.default_rng(0).integers(0, 400, 4 * 10**6, np.int32)
    order = KINDS[kind](lengths, cache=tmp_path)
    order = cseq.Balanced(order, 64, over=over, cache=tmp_path)
    order.reader(1).samples(0, 0, 8)
    path = tmp_path / "order.pickle"
    path.write_bytes(pickle.dumps(order))
    done = run_anew(OPEN, str(path))
    assert int(done.stdout) < 13_000, done.stderr


def test_digest():
    """It is the digest of four chains, for values of any type and layout."""
    values = np.arange(200_003) * 7919 % 251
    expected = digest(values)
    assert all(digest(values.astype(kind)) == expected for kind in ("u1", "i4", ">i8"))
    assert digest(np.repeat(values, 3)[::3]) == expected != fingerprint(values)
    for at in (0, 1, 2, 3, 65_535, 65_536, 200_002):
        changed = values.copy()
        changed[at] += 1
        assert digest(changed) != expected
    assert digest(values[:-1]) != expected != digest(np.append(values, 0))
    assert len({digest(np.zeros(k, np.int64)) for k in range(20)}) == 20
