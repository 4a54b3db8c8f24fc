"""The order of an epoch: fair, and computed only as far as it is used."""

import ctypes
import itertools
import json
import math
import mmap
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from fair import chi
from hypothesis import given, settings
from hypothesis import strategies as st
from indexers import Indices1
from reference import GOLDEN, LEAST, WORD, bounded, derive, mix, order, words
from reference_draws import perm, stream
from refusing import refusing

import cseq
from cseq._core import FeistelReader, RangeReader, TableReader
from cseq._core import derive as core_derive
from cseq.order._readers import Permutation, gather
from cseq.order.shuffled import Shuffled

HERE = Path(__file__).parents[1]
FILE = json.loads((HERE / "golden" / "shuffle.json").read_text(encoding="ascii"))
COMPUTED = json.loads((HERE / "golden" / "feistel.json").read_text(encoding="ascii"))

u64 = ctypes.c_uint64
seeds = st.integers(0, WORD)
sizes = st.one_of(st.integers(1, 70), st.integers(1, 5000))


class Epoch:
    def __init__(self, reader, epoch=0):
        self.reader = reader
        self.epoch = epoch

    def read(self, start, count):
        return self.reader.samples(self.epoch, start, count)[0]


def begun(n, seed, epoch=0):
    """Return an epoch of fisher-yates-v1."""
    return Epoch(TableReader(n, seed), epoch)


def computed(n, seed, epoch=0):
    """Return an epoch of feistel-v1."""
    return Epoch(Shuffled().over(n).reader(seed), epoch)


def key_of(record, *names):
    """Select numbers of a golden record."""
    return tuple(record[each] for each in names)


def test_page_shows_the_golden_file():
    """The test vectors in docs/inside/shuffle.md equal the golden file's."""
    page = (HERE.parent / "docs" / "inside" / "shuffle.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| (`?)([\w ]+)", page, re.MULTILINE)
    shown = {
        tuple(WORD if cell == "2⁶⁴-1" else int(cell) for cell in cells): text.split()
        for *cells, _, text in rows
        if cells[0].isdigit() or cells[0] == "2⁶⁴-1"
    }
    words_of = {key_of(r, "seed", "epoch", "purpose"): r["words"] for r in FILE["derive"]}
    orders = {key_of(r, "n", "seed", "epoch"): r for r in FILE["permutation"]}
    assert len(shown) == 10
    for key, values in shown.items():
        if key in words_of:
            assert values == words_of[key]
        else:
            assert [int(value) for value in values] == orders[key]["first"]
    computed = {key_of(r, "n", "seed", "epoch"): r["samples"] for r in COMPUTED["orders"]}
    rows = re.findall(r"^\| `(\d+)(?:\*\*(\d+))?` \| (\S+) \| (\S+) \| ([\d ]+) \|", page, re.M)
    assert len(rows) == 4
    for base, power, *where, text in rows:
        key = (int(base) ** int(power or 1), *(WORD if at == "2⁶⁴-1" else int(at) for at in where))
        assert [int(value) for value in text.split()] == computed[key][:6]


def test_building_blocks():
    """The reference's generators are the published SplitMix64 and xoshiro256++."""
    assert mix(1234567) == 6457827717110365317
    assert mix(1234567 + GOLDEN & WORD) == 3203168211198807973
    made = list(itertools.islice(words((1, 2, 3, 4)), 4))
    assert made == [41943041, 58720359, 3588806011781223, 3591011842654386]


@given(n=st.integers(0, 400), seed=seeds, epoch=seeds)
def test_reference(n, seed, epoch):
    """Every permutation equals the reference in plain Python."""
    assert cseq.permutation(n, seed, epoch).tolist() == list(order(n, seed, epoch))


@given(seed=seeds, epoch=seeds, purpose=seeds, count=st.integers(0, 8))
def test_reference_words(seed, epoch, purpose, count):
    """Every derived word equals the reference."""
    assert core_derive(seed, epoch, purpose, count) == derive(seed, epoch, purpose, count)


@given(n=sizes, seed=seeds, data=st.data())
def test_any_position_at_any_time(n, seed, data):
    """Positions can be read in any order, and again."""
    made, whole = begun(n, seed), cseq.permutation(n, seed)
    for _ in range(5):
        start = data.draw(st.integers(0, n))
        count = data.draw(st.integers(0, n - start))
        assert np.array_equal(made.read(start, count), whole[start : start + count])


@given(
    n=sizes, seed=seeds, epochs=st.lists(st.tuples(seeds, st.floats(0, 1)), min_size=1, max_size=8)
)
def test_table_is_reused(n, seed, epochs):
    """After epochs that stopped anywhere, a table gives the same as a fresh one."""
    made = TableReader(n, seed)
    for epoch, share in epochs:
        upto = int(n * share)
        assert np.array_equal(
            made.samples(epoch, 0, upto)[0], cseq.permutation(n, seed, epoch)[:upto]
        )
    assert np.array_equal(made.samples(5, 0, n)[0], cseq.permutation(n, seed, 5))


@pytest.mark.needs("POSIX")
@pytest.mark.parametrize("what", ["order", "permutation"])
def test_interruption(what):
    """A signal handler runs in the middle of a long shuffle, which can be repeated."""
    n, made = 30_000_000, begun(30_000_000, 1)
    handler = signal.signal(signal.SIGALRM, refusing(InterruptedError))
    try:
        with pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
            cseq.permutation(n, 1) if what == "permutation" else made.read(n - 1, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert made.read(0, 40).tolist() == list(itertools.islice(order(n, 1, 0), 40))


@pytest.mark.parametrize(
    ("value", "error"),
    [*((value, TypeError) for value in (True, 1.5, "1", None, np.float64(2), np.bool_(True))),
     *((value, ValueError) for value in (-1, 2**64, np.int64(-5)))],
)  # fmt: skip
def test_no_number_of_64_bits(value, error):
    """A value that is no integer, or out of range, raises an error that has it, as any argument."""
    said = re.escape(repr(value)) if error is TypeError else str(int(value))
    for arguments in ((value, 1, 1), (10, value, 1), (10, 1, value)):
        with pytest.raises(error, match=said):
            cseq.permutation(*arguments)
    for kind in (TableReader, FeistelReader):
        calls = (kind, value, 1), (kind, LEAST, value), (kind(LEAST, 1).samples, value, 0, 1)
        for function, *arguments in calls:
            with pytest.raises(error, match=said if error is ValueError else None):
                function(*arguments)


@pytest.mark.parametrize(("start", "count"), [(0, 11), (10, 1), (11, 0), (5, 6), (2**63, 2**63)])
def test_beyond_the_end(start, count):
    """Positions beyond the end are an IndexError."""
    for made in (TableReader(10, 1), RangeReader(10)):
        with pytest.raises(IndexError, match="exceed the epoch's 10 units"):
            made.samples(0, start, count)


@given(
    st.one_of(st.integers(1, 300), st.integers(LEAST, LEAST + 9), st.integers(LEAST, 2**48)),
    st.integers(0, WORD),
    st.none() | st.integers(0, WORD - 1),
    st.data(),
)
def test_permutations_that_orders_are_made_of(n, seed, key, data):
    """Any elements at once equal the reference, with and without a key."""
    made = Permutation(n, seed, 3, 14, *([] if key is None else [key]))
    expected = perm(n, stream(seed, 3, 14, key))
    places = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    assert made.at(np.array(places, np.int64)).tolist() == [expected(place) for place in places]


def test_places_of_a_permutation_are_checked():
    """Positions beyond the end raise an IndexError, even in a reader."""
    for n in (LEAST - 1, LEAST):
        with pytest.raises(IndexError):
            Permutation(n, 1, 0, 14).at(np.array([0, n]))
    for units in ([0, 10], [-1], [9, 10]):
        with pytest.raises(IndexError, match=r"not all in \[0, 10\)"):
            gather(RangeReader(10), 0, np.array(units))


def test_more_samples_than_a_table_has():
    """Above 2^32 samples, the error names the algorithm without a table."""
    for make in (cseq.permutation, TableReader):
        with pytest.raises(ValueError, match=f"not {2**32 + 1}; pass shuffle='feistel'"):
            make(2**32 + 1, 1)
    with pytest.raises(ValueError, match="shuffle='feistel'"):
        cseq.MPSequence(np.arange(9), 2**32 + 1)


@pytest.fixture(scope="module", params=["", "-DCSEQ_PORTABLE_MUL"], ids=["native", "portable"])
def header(request, tmp_path_factory):
    """Compile the header alone, with and without the compiler's wide multiplication."""
    compiler = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    if compiler is None or sys.platform == "win32":
        pytest.skip("no C compiler to compile the header with")
    library = tmp_path_factory.mktemp("header") / "shuffle.so"
    include = HERE.parent / "cseq" / "include"
    flags = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", "-shared"]
    options = [request.param] if request.param else []
    source = HERE / "c" / "shuffle.c"
    command = [compiler, *flags, *options, f"-I{include}", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=100)
    loaded = ctypes.CDLL(str(library))
    loaded.multiply.restype = ctypes.c_uint64
    return loaded


def test_multiplication(header):
    """Either way, the product of two words is exact."""
    rng, low = random.Random(1), u64()
    edges = [0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63, WORD - 1, WORD, GOLDEN]
    drawn = [(rng.getrandbits(64), rng.getrandbits(64)) for _ in range(1000)]
    for a, b in [*itertools.product(edges, edges), *drawn]:
        high = header.multiply(u64(a), u64(b), ctypes.byref(low))
        assert high << 64 | low.value == a * b


@pytest.mark.parametrize(
    "limit", [1, 2, 3, 10**6, 2**32, 2**62 + 1, 2**63, 2**63 + 1, 3 * 2**62, WORD]
)
def test_rejected_words(header, limit):
    """Words that would favour some numbers are drawn again, as in the reference."""
    state, count = derive(limit, 0, 1, 4), 500
    out = (ctypes.c_uint64 * count)()
    header.bounded((ctypes.c_uint64 * 4)(*state), u64(limit), out, u64(count))
    stream = words(state)
    assert list(out) == [bounded(stream, limit) for _ in range(count)]


@pytest.mark.needs("POSIX")
def test_as_many_as_32_bits_can_name(header):
    """2^32 samples have the reference's order, though no test uses 16 GB."""
    n = 2**32
    # This is MAP_NORESERVE.
    reserve = 0x4000 if sys.platform == "linux" else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve
    pages, count = n * 4 // 4096, 500
    out = (ctypes.c_int64 * count)()
    try:
        table, tags = (mmap.mmap(-1, size, flags=flags) for size in (pages * 4096, pages * 4))
    except OSError as error:
        pytest.skip(f"this system does not promise {pages * 4096} bytes: {error}")
    with table, tags:
        where = [ctypes.c_char.from_buffer(memory) for memory in (table, tags)]
        addresses = [ctypes.c_void_p(ctypes.addressof(first)) for first in where]
        header.first(u64(n), *addresses, u64(8), u64(9), out, u64(count))
        del where
    values = list(out)
    assert values == list(itertools.islice(order(n, 8, 9), count))
    assert max(values) >= 2**31


@pytest.mark.parametrize("left", [0, 1, 2])
@settings(max_examples=20)
@given(n=st.integers(1, 5000), last=st.integers(0, 3))
def test_generations_wrap_around(header, left, n, last):
    """After 2^32 epochs on one table, generations restart, and no page wrongly counts as clean."""
    pages = -(-n * 4 // 4096)
    table, tags = (ctypes.c_uint64 * (pages * 512))(), (ctypes.c_uint32 * pages)()
    out = (ctypes.c_int64 * n)()
    generation = ctypes.c_uint32(2**32 - 1 - left)
    header.epochs(u64(n), table, tags, generation, u64(6), u64(last + 1), out)
    assert list(out) == cseq.permutation(n, 6, last).tolist()


OUT_OF_MEMORY = """
import resource
from pathlib import Path
from cseq._core import TableReader
order = TableReader(2**30, 0)
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
table = 4 * 2**30  # bytes; there is room for it, but not for the tags of its pages
resource.setrlimit(resource.RLIMIT_AS, (size + table + 2**20, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        order.samples(0, 0, 1)
    except MemoryError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(set(order.samples(0, 0, 4)[0].tolist())))
"""


@pytest.mark.needs("Linux")
def test_no_memory_for_the_table(run_anew):
    """Each attempt raises MemoryError until there is room."""
    done = run_anew(OUT_OF_MEMORY)
    line = "cannot allocate the index table of 1073741824 samples (4294967296 bytes)\n"
    assert done.stdout == 2 * line + "4\n", done.stderr


@settings(max_examples=30, deadline=None)
@given(n=st.integers(LEAST, LEAST + 5000), seed=seeds, data=st.data())
def test_an_order_without_a_table_is_a_permutation(n, seed, data):
    """Each sample comes once, read in any pieces."""
    made = computed(n, seed)
    whole = made.read(0, n)
    assert np.array_equal(np.sort(whole), np.arange(n))
    start = data.draw(st.integers(0, n - 1))
    count = data.draw(st.integers(0, min(100, n - start)))
    piece = made.read(start, count)
    assert np.array_equal(piece, whole[start : start + count])


def test_few_samples_have_the_order_of_fisher_yates():
    """A network over fewer samples would have no room for its keys, and is refused."""
    n = LEAST - 1
    assert np.array_equal(computed(n, 3, 4).read(0, n), begun(n, 3, 4).read(0, n))
    assert not np.array_equal(
        cseq.permutation(LEAST, 3, 4, "feistel-v1"), cseq.permutation(LEAST, 3, 4)
    )
    with pytest.raises(ValueError, match="n=65535 is less than 65536"):
        FeistelReader(n, 1)


def test_an_order_without_a_table_is_fair():
    """The chi-square is one that a table would pass: where samples go, and which are neighbours."""
    n, parts = 2**20 + 5, 64
    whole = computed(n, 11, 2).read(0, n)
    b = -(-n // (math.isqrt(n - 1) + 1))
    for distance in (0, 1, 2, 31, 32, b, b + 1, 2 * b, 2**19):
        if distance:
            moved = (whole[distance:] - whole[:-distance]) % n
        else:
            moved = (whole - np.arange(n)) % n
        counts = np.bincount(moved * parts // n, minlength=parts)
        assert abs(chi(counts, len(moved) / parts)) < 4.5


def test_a_trillion_samples_begin_at_once():
    """In a rank, after a resume, in test mode and in threads, nothing is as long as the epoch."""
    n = 10**12
    options = {"batch_size": 4, "seed": 5, "out_type": "null", "shuffle": "feistel"}

    got = []
    for rank in range(2):
        manager = cseq.MTSequence(Indices1, n, 1, shard=(rank, 2), **options)
        with manager.start() as batches:
            got.append(next(iter(batches)))
            state = manager.state_dict()
    assert (json.loads(state["order"])["name"], state["consumed"]) == ("feistel-v1", 8)
    order = computed(n, 5)
    assert np.array_equal(np.concatenate(got), order.read(0, 8))
    later = cseq.MTSequence(Indices1, n, 1, **options)
    later.load_state_dict(state | {"consumed": 6 * 10**11})
    with later.start_test() as batches:
        assert np.array_equal(next(iter(batches)), order.read(6 * 10**11, 4))


@pytest.mark.parametrize("algorithm", ["feistel", None, 1])
def test_an_unknown_algorithm_is_refused(algorithm):
    """The error has the known ones."""
    with pytest.raises(ValueError, match="is not one of"):
        cseq.permutation(10, 1, 0, algorithm)
