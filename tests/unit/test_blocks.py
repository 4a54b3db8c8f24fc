"""`Blocks`: golden, in windows and lanes, few reads of a chunk, and fair."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranked import batches, check, sampler, united
from reference_draws import blocks, parts

import cseq

HERE = Path(__file__).parents[1]
FILE = json.loads((HERE / "golden" / "orders_blocks.json").read_text(encoding="ascii"))


def made(n: int, rows: int, window: int, lanes: int) -> cseq.Blocks:
    """Make an order."""
    return cseq.Blocks(rows, window, lanes, samples=n)


def drawn(order: cseq.Order, seed: int, epoch: int = 0) -> np.ndarray[Any, Any]:
    """Read an epoch."""
    return order.reader(seed).samples(epoch, 0, order.units)[0]


@st.composite
def shapes(draw: Any) -> tuple[int, int, int, int]:
    """Draw samples, rows, window, lanes."""
    lanes = draw(st.integers(1, 6))
    window = lanes * draw(st.integers(1, 4))
    return draw(st.integers(1, 400)), draw(st.integers(1, 12)), window, lanes


@pytest.mark.parametrize("record", FILE["orders"])
def test_golden(record: dict[str, Any]) -> None:
    """An order is the same for ever: its first samples in clear, and the hash of them all."""
    order = made(*(record[key] for key in ("n", "rows", "window", "lanes")))
    samples = drawn(order, record["seed"], record["epoch"])
    digest = hashlib.sha256(samples.astype("<i8").tobytes()).hexdigest()
    assert (samples[:10].tolist(), samples[-1]) == (record["first"], record["last"])
    assert digest == record["sha256"]


@given(shapes(), st.integers(0, 2**64 - 1), st.integers(0, 9))
def test_reference(shape: tuple[int, int, int, int], seed: int, epoch: int) -> None:
    """It is that of the reference: short last blocks, lanes of unequal length."""
    expected, _ = blocks(*shape, seed, epoch)
    order = made(*shape)
    assert drawn(order, seed, epoch).tolist() == expected
    reader = order.reader(seed)
    for place in (len(expected) - 1, 0, len(expected) // 2):
        assert reader.samples(epoch, place, 1)[0].tolist() == [expected[place]]


@given(shapes(), st.sampled_from([1, 2, 3, 4]), st.integers(1, 12))
def test_ranks_have_lanes(shape: tuple[int, int, int, int], ranks: int, size: int) -> None:
    """Of a global batch, each rank has the samples of its lanes, if they can be divided so."""
    order, lanes = made(*shape), shape[3]
    expected = parts(*blocks(*shape, 1, 2), lanes, ranks, size)
    for k, got in enumerate(united(order, size, ranks, 2)):
        if k < len(expected):
            assert [samples for samples, _ in got] == expected[k]


@pytest.mark.parametrize("shape", [(60, 4, 6, 1), (60, 4, 8, 4), (59, 4, 6, 3), (50, 3, 100, 4)])
def test_ranks_and_resumes(shape: tuple[int, int, int, int]) -> None:
    """Any ranks have one stream, which goes on at any place."""
    check(made(*shape), contiguous=False)


def test_lanes_after_a_resume() -> None:
    """A global batch begins anywhere: each rank has its lanes, and all together its samples."""
    order = made(900, 5, 24, 8)
    whole = drawn(order, 1, 0)
    for consumed in (1, 13, 40):
        there = consumed
        for got in united(order, 4, 4, 0, consumed):
            samples = [sample for part, _ in got for sample in part]
            assert sorted(samples) == sorted(whole[there : there + len(samples)].tolist())
            there += len(samples)
        assert there == 900


def reads(order: cseq.Blocks, ranks: int, size: int, keep: int) -> float:
    """Count how often a chunk is read, over all ranks, each of which keeps some chunks."""
    count = 0
    for rank in range(ranks):
        kept: OrderedDict[int, None] = OrderedDict()
        for samples, _ in batches(sampler(order, size, rank, ranks)):
            for chunk in dict.fromkeys(sample // order.rows for sample in samples):
                count += chunk not in kept
                kept[chunk] = kept.pop(chunk, None)
                if len(kept) > keep:
                    kept.popitem(last=False)
    return count / (order.units / order.rows)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_read_each_chunk_about_once(ranks: int) -> None:
    """With lanes, at most 1.3 times over all ranks; with one, each rank reads all of them."""
    n = 64 * 600 - 17
    keep = max(64 // ranks * 5 // 4, 64 // ranks + 8)
    assert reads(made(n, 64, 64, 8), ranks, 256 // ranks, keep) <= 1.3
    if ranks == 4:
        assert reads(made(n, 64, 64, 1), ranks, 256 // ranks, keep) > 3.5


@pytest.mark.parametrize("lanes", [1, 8])
def test_batches_are_mixed(lanes: int) -> None:
    """256 samples in a row have touched most blocks of a window."""
    order = drawn(made(64 * 1000, 64, 64, lanes), 3) // 64
    touched = [len(set(order[k : k + 256].tolist())) for k in range(0, 50_000, 256)]
    assert np.median(touched) >= 48
    assert min(touched) >= 32


def test_samples_are_shuffled_within_a_window() -> None:
    """The place of a sample in its window is uniform, whichever it is."""
    reader = made(12, 3, 4, 1).reader(5)  # one window
    epochs = 6000
    where = np.array([np.argsort(reader.samples(epoch, 0, 12)[0]) for epoch in range(epochs)])
    counts = np.array([np.bincount(where[:, sample], minlength=12) for sample in range(12)])
    chi = ((counts - epochs / 12) ** 2 / (epochs / 12)).sum(1)
    assert (abs(chi - 11) / math.sqrt(22) < 4).all()


def test_blocks_are_shuffled() -> None:
    """The window that a block is in is uniform over the epochs."""
    reader = made(40, 4, 2, 2).reader(6)  # ten blocks, one in a lane's window
    epochs = 2000
    firsts = np.array([reader.samples(epoch, 0, 8)[0] // 4 for epoch in range(epochs)])
    counts = np.bincount(firsts[:, :2].ravel(), minlength=10)
    chi = ((counts - epochs / 5) ** 2 / (epochs / 5)).sum()
    assert abs(chi - 9) / math.sqrt(18) < 4


def test_many_samples() -> None:
    """More than 2**32 samples, and any place at once."""
    order = made(2**40 + 5, 512, 64, 4)
    reader = order.reader(1)
    there = [reader.samples(3, place, 500)[0] for place in (0, 2**33, 2**40 - 495)]
    assert len(np.unique(np.concatenate(there))) == 1500
    assert max(samples.max() for samples in there) < 2**40 + 5
    for samples in there[:2]:
        assert len(np.unique(samples // 512)) <= 64


class Stopped(Exception):
    """Raised by a signal handler."""


def test_signal_handlers_run_in_a_long_shuffle() -> None:
    """A handler runs between two slices of it, and may read, too; an exception of it is raised."""
    order = made(3 << 22, 1 << 12, 1 << 10, 1)
    reader, seen = order.reader(1), []

    def handle(*_: object) -> None:
        seen.append(reader.samples(7, 3 << 21, 5))
        if len(seen) > 1:
            raise Stopped

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        for epoch in itertools.count():
            samples = reader.samples(epoch, 0, 5)[0].tolist()
            if seen:
                break
        assert samples == order.reader(1).samples(epoch, 0, 5)[0].tolist()

        def read_on() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            for further in itertools.count(epoch + 1):
                reader.samples(further, 0, 5)

        with pytest.raises(Stopped):
            read_on()
        assert samples == reader.samples(epoch, 0, 5)[0].tolist()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_of_the_data() -> None:
    """Without a number of samples, there are as many as the data has."""
    assert cseq.Blocks(4, 2).units == 0
    order = cseq.Blocks(4, 2).over(10)
    assert sorted(drawn(order, 1).tolist()) == list(range(10))
    assert "3 blocks" in order.describe()
    assert order.facts() == made(10, 4, 2, 1).facts()
    with pytest.raises(ValueError, match="window=3"):
        made(10, 4, 3, 1).resumed(order.facts(), 0, 0, 0)


def test_bad_arguments() -> None:
    """The message names the argument, its value and the remedy."""
    with pytest.raises(ValueError, match="rows=0"):
        cseq.Blocks(0, 4)
    with pytest.raises(ValueError, match="window=0"):
        cseq.Blocks(4, 0)
    with pytest.raises(ValueError, match=r"window=1048577 is above 1048576"):
        cseq.Blocks(2**12, 2**20 + 1)
    with pytest.raises(ValueError, match="lanes=3 does not divide window=8; give a window of 9"):
        cseq.Blocks(4, 8, 3)
    with pytest.raises(ValueError, match="lanes=9 is above 8"):
        cseq.Blocks(4, 8, 9)
    with pytest.raises(TypeError, match=r"rows=2\.5"):
        cseq.Blocks(2.5, 8)  # type: ignore[arg-type]
