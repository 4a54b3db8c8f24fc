"""What Prometheus reads is what a loader has counted, and never goes down."""

from __future__ import annotations

import threading
import urllib.request
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cseq

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

if TYPE_CHECKING:
    from collections.abc import Callable

COUNTERS = {
    "cseq_batches_total": "batches",
    "cseq_samples_total": "samples",
    "cseq_delivered_bytes_total": "nbytes",
    "cseq_elapsed_seconds_total": "elapsed",
    "cseq_waited_seconds_total": "loop_waited",
    "cseq_restarts_total": "restarts",
    "cseq_retries_total": "retries",
    "cseq_skips_total": "skips",
    "cseq_copies_total": "copies",
}
HISTOGRAMS = ["index", "step", "wait"]
GAUGES = {"cseq_workers", "cseq_buffer", "cseq_ready", "cseq_start_seconds"}


class Numbers:
    """The indices themselves."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return indices


class Kept:
    """A loader that says what it said last, and nothing without it."""

    def __init__(self, stats: Any = None) -> None:
        self.last = stats

    def stats(self) -> Any:
        if self.last is None:
            raise RuntimeError("there are no workers")
        return self.last


def numbers(**options: Any) -> Any:
    """Make a manager of ten batches in an epoch."""
    return cseq.MTSequence(Numbers, 40, batch_size=4, out_type="null", **options)


def scraped(text: str) -> dict[str, Any]:
    """Parse what Prometheus gets: the samples of each name, and their labels."""
    found: dict[str, Any] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def reader(**managers: Any) -> Callable[[], dict[str, Any]]:
    """Register a collector alone, and return what scrapes it."""
    from cseq.adapters.prometheus import Collector

    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    registry.register(Collector(**managers))
    return lambda: scraped(prometheus_client.generate_latest(registry).decode())


def test_all_that_is_counted() -> None:
    """Each number is that of stats(); histograms have their counts at edges that are theirs."""
    with numbers().start() as manager:
        for _ in range(2):
            list(manager)
        stats = manager.stats()
    assert stats.index_seconds.count == 20
    found = reader(train=Kept(stats))()
    parts = {f"cseq_{h}_seconds_{p}" for h in HISTOGRAMS for p in ("bucket", "count", "sum")}
    assert set(found) == {*COUNTERS, *GAUGES, *parts}
    for name, attribute in COUNTERS.items():
        assert found[name] == [({"loader": "train"}, getattr(stats, attribute))]
    assert found["cseq_workers"][0][1] == stats.num_workers
    assert found["cseq_buffer"][0][1] == stats.buffer
    assert found["cseq_start_seconds"][0][1] == stats.start_waited
    for name in HISTOGRAMS:
        histogram = getattr(stats, f"{name}_seconds")
        family = f"cseq_{name}_seconds"
        assert found[f"{family}_count"][0][1] == histogram.count
        assert found[f"{family}_sum"][0][1] == pytest.approx(histogram.total)
        buckets = [(float(labels["le"]), count) for labels, count in found[f"{family}_bucket"]]
        assert [end for end, _ in buckets] == [*(2.0**k * 64e-9 for k in range(4, 31)), np.inf]
        for end, count in buckets:
            below = [part for _, to, part in histogram.buckets() if to <= end * 1.000001]
            assert count == (histogram.count if end == np.inf else sum(below))


def test_what_prometheus_gets_over_http() -> None:
    """Its own server has them, of two loaders, while the one runs and the other has ended."""
    from cseq.adapters.prometheus import Collector

    with numbers().start_test() as ended:
        next(iter(ended))
    manager = numbers()
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(train=manager, val=ended))
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry=registry)
    try:
        with manager.start() as batches:
            list(batches)
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            with urllib.request.urlopen(url) as response:
                found = scraped(response.read().decode())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert found["cseq_batches_total"] == [({"loader": "train"}, 10), ({"loader": "val"}, 1)]


def test_a_new_run_adds_to_the_former() -> None:
    """Counters go on where those of the run before ended, histograms too."""
    manager = numbers()
    read = reader(train=manager)
    assert read()["cseq_batches_total"][0][1] == 0
    for batches in (10, 20):
        with manager.start() as running:
            list(running)
            found = read()
            assert found["cseq_batches_total"][0][1] == batches
            assert found["cseq_index_seconds_count"][0][1] == batches
            assert found["cseq_workers"][0][1] == manager.stats().num_workers
    assert read()["cseq_batches_total"][0][1] == 20


def test_a_time_that_was_read_too_long_stays() -> None:
    """A lower number would be a reset to Prometheus, which then adds the whole of it."""
    with numbers().start() as manager:
        list(manager)
        stats = manager.stats()
    kept = Kept(replace(stats, elapsed=stats.elapsed + 1))
    read = reader(train=kept)
    longer = read()["cseq_elapsed_seconds_total"][0][1]
    kept.last = stats
    assert read()["cseq_elapsed_seconds_total"][0][1] == longer == stats.elapsed + 1


def test_a_loader_without_workers() -> None:
    """Its counters stay as they are; what is of the moment is not there."""
    kept = Kept()
    read = reader(train=kept)
    found = read()
    assert found["cseq_batches_total"] == [({"loader": "train"}, 0)]
    with numbers().start() as manager:
        list(manager)
        kept.last = manager.stats()
    assert {*GAUGES} <= read().keys()
    kept.last = None
    found = read()
    assert GAUGES.isdisjoint(found)
    assert found["cseq_batches_total"] == [({"loader": "train"}, 10)]


def test_a_scrape_while_the_loop_runs() -> None:
    """Other threads read while batches are taken, and managers start and end; nothing goes down."""
    manager = numbers()
    read = reader(train=manager)
    ended = threading.Event()
    seen: list[list[dict[str, Any]]] = [[], []]

    def scrape(found: list[dict[str, Any]]) -> None:
        while not ended.is_set():
            found.append(read())

    scrapers = [threading.Thread(target=scrape, args=(found,)) for found in seen]
    for thread in scrapers:
        thread.start()
    try:
        taken = 0
        while taken < 5 or min(map(len, seen)) < 5:
            with manager.start() as batches:
                for _ in range(20):
                    list(batches)
            taken += 1
    finally:
        ended.set()
        for thread in scrapers:
            thread.join()
    for found in seen:
        for before, after in pairwise(found):
            assert before.keys() - GAUGES == after.keys() - GAUGES
            for name in before.keys() - GAUGES:
                for (labels, then), (again, now) in zip(before[name], after[name], strict=True):
                    assert labels == again
                    assert then <= now, (name, labels)
    assert read()["cseq_batches_total"][0][1] <= 200 * taken


def test_what_is_no_loader_is_refused() -> None:
    """At once, with the remedy."""
    from cseq.adapters.prometheus import Collector

    with pytest.raises(TypeError, match="there is no loader; give a manager"):
        Collector()
    with pytest.raises(TypeError, match=r"manager=3 has no stats\(\)"):
        Collector(train=3)
