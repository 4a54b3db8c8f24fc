"""Prometheus: what loaders have counted, read when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cseq.adapters.figures import COUNTERS, ENDS, GAUGES, HISTOGRAMS, needs, totals_of

with needs("prometheus_client", "prometheus-client"):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

__all__ = ["Collector"]

BOUNDS = [*(repr(float(end)) for end in ENDS), "+Inf"]


class Collector:
    """Metrics of loaders for a registry of prometheus_client.

    What loaders count anyway is read when a registry collects, and at no other time. The names
    begin with ``cseq_``; the label `loader` has the names that the loaders are given here. Counters
    go on when a loader starts again.

    Parameters
    ----------
    **managers : manager or DataLoader
        The loaders, by name.

    Examples
    --------
    >>> prometheus_client.REGISTRY.register(Collector(train=manager))  # doctest: +SKIP
    """

    def __init__(self, **managers: Any) -> None:
        self._totals = totals_of(managers)

    def collect(self) -> Iterator[Metric]:
        """Read the loaders; what a registry calls."""
        read = {loader: totals.read() for loader, totals in self._totals.items()}
        for name, unit, _, text in COUNTERS:
            counter = CounterMetricFamily(f"cseq_{name}", text, labels=["loader"], unit=unit)
            for loader, (_, totals) in read.items():
                counter.add_metric([loader], float(totals[name]))
            yield counter
        for name, unit, _, text in HISTOGRAMS:
            histogram = HistogramMetricFamily(f"cseq_{name}", text, labels=["loader"], unit=unit)
            for loader, (_, totals) in read.items():
                counts = totals[name]["counts"].tolist()
                buckets = list(zip(BOUNDS, counts, strict=True))
                histogram.add_metric([loader], buckets, float(totals[name]["sum"]))
            yield histogram
        for name, unit, value, text in GAUGES:
            gauge = GaugeMetricFamily(f"cseq_{name}", text, labels=["loader"], unit=unit)
            for loader, (stats, _) in read.items():
                if stats is not None:
                    gauge.add_metric([loader], float(value(stats)))
            yield gauge
