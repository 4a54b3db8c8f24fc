"""What OpenTelemetry observes is what loaders have counted when a reader collects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import cseq

metrics = pytest.importorskip("opentelemetry.sdk.metrics")
export = pytest.importorskip("opentelemetry.sdk.metrics.export")

if TYPE_CHECKING:
    import numpy as np

COUNTERS = {
    "cseq.batches": ("batches", ""),
    "cseq.samples": ("samples", ""),
    "cseq.delivered": ("nbytes", "By"),
    "cseq.elapsed": ("elapsed", "s"),
    "cseq.waited": ("loop_waited", "s"),
    "cseq.restarts": ("restarts", ""),
    "cseq.retries": ("retries", ""),
    "cseq.skips": ("skips", ""),
    "cseq.copies": ("copies", ""),
}
HISTOGRAMS = ["index", "step", "wait"]
GAUGES = {"cseq.workers": "", "cseq.buffer": "", "cseq.ready": "", "cseq.start": "s"}


class Numbers:
    """The indices themselves."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return indices


class Kept:
    """A loader that says what it said last, and nothing without it."""

    def __init__(self) -> None:
        self.last: Any = None

    def stats(self) -> Any:
        if self.last is None:
            raise RuntimeError("there are no workers")
        return self.last


def numbers() -> Any:
    """Make a manager of ten batches in an epoch."""
    return cseq.MTSequence(Numbers, 40, batch_size=4, out_type="null")


class Reader:
    """A provider of its own, and what it collects."""

    def __init__(self, **managers: Any) -> None:
        from cseq.adapters.opentelemetry import instrument

        self._reader = export.InMemoryMetricReader()
        instrument(metrics.MeterProvider([self._reader]), **managers)

    def __call__(self) -> dict[str, Any]:
        """Collect: of each name the unit, the kind, and values by loader."""
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        [resource] = data.resource_metrics
        [scope] = resource.scope_metrics
        assert scope.scope.name == "cseq"
        found = {}
        for metric in scope.metrics:
            assert metric.description.endswith(".")
            points = {p.attributes["loader"]: p.value for p in metric.data.data_points}
            grows = getattr(metric.data, "is_monotonic", False)
            found[metric.name] = (metric.unit, grows, points)
        return found


def test_all_that_is_counted() -> None:
    """Each number is that of stats(), by the name of its loader."""
    kept = Kept()
    read = Reader(train=kept)
    with numbers().start() as manager:
        list(manager)
        kept.last = first = manager.stats()
        found = read()
        for name, (attribute, unit) in COUNTERS.items():
            assert found.pop(name) == (unit, True, {"train": getattr(first, attribute)})
        for name in HISTOGRAMS:
            histogram = getattr(first, f"{name}_seconds")
            assert found.pop(f"cseq.{name}.time") == ("s", True, {"train": histogram.total})
            if histogram.count:
                latest = {"train": histogram.quantile(0.99)}
                assert found.pop(f"cseq.{name}.p99") == ("s", False, latest)
        assert found.pop("cseq.workers") == ("", False, {"train": first.num_workers})
        assert {name: unit for name, (unit, _, _) in found.items()} == {
            name: unit for name, unit in GAUGES.items() if name != "cseq.workers"
        }
        list(manager)
        kept.last = manager.stats()
        found = read()
    assert found["cseq.batches"][2] == {"train": 20}
    latest = kept.last.since(first).index_seconds
    assert latest.count == 10
    assert found["cseq.index.p99"][2] == {"train": latest.quantile(0.99)}
    assert "cseq.index.p99" not in read()  # there was no batch since


def test_a_new_run_adds_to_the_former() -> None:
    """Counters go on where those of the run before ended; a quantile is of the new one."""
    manager = numbers()
    with numbers().start_test() as ended:
        next(iter(ended))
    read = Reader(train=manager, val=ended)
    for batches in (10, 20):
        with manager.start() as running:
            list(running)
            found = read()
            assert found["cseq.batches"][2] == {"train": batches, "val": 1}
            assert list(found["cseq.index.p99"][2]) == ["train"]


def test_a_loader_without_workers() -> None:
    """Its counters stay as they are; what is of the moment is not there."""
    kept = Kept()
    read = Reader(train=kept)
    found = read()
    assert found["cseq.batches"][2] == {"train": 0}
    assert set(GAUGES).isdisjoint(found)


def test_what_is_no_loader_is_refused() -> None:
    """At once, with the remedy."""
    from cseq.adapters.opentelemetry import instrument

    with pytest.raises(TypeError, match="there is no loader; give a manager"):
        instrument()
    with pytest.raises(TypeError, match=r"manager=3 has no stats\(\)"):
        instrument(train=3)
