"""OpenTelemetry: what loaders have counted, in instruments that are observed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cseq.adapters.figures import COUNTERS, GAUGES, HISTOGRAMS, Totals, added, needs, totals_of

with needs("opentelemetry", "opentelemetry-api"):
    from opentelemetry.metrics import Observation, get_meter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.metrics import MeterProvider

    from cseq.adapters.figures import Metric
    from cseq.stats import Stats

__all__ = ["instrument"]

UNITS = {"": "", "bytes": "By", "seconds": "s"}


def instrument(provider: MeterProvider | None = None, /, **managers: Any) -> None:
    """Make instruments that observe loaders.

    What loaders count anyway is read when a reader of the provider collects, and at no other time.
    The names begin with ``cseq.``; the attribute `loader` has the names that the loaders are given
    here. Counters go on when a loader starts again. There are no histograms that can be observed:
    for each there is a counter of its seconds, and a gauge of what 99 in 100 took at most since the
    gauge was last read.

    Parameters
    ----------
    provider : MeterProvider, optional
        None: the global one, also if that is set later.
    **managers : manager or DataLoader
        The loaders, by name.

    Examples
    --------
    >>> instrument(train=manager)  # doctest: +SKIP
    """
    read = totals_of(managers)
    meter = get_meter("cseq", meter_provider=provider)
    for metric in COUNTERS:
        observe = partial(observe_total, read, metric.name, None)
        name, unit = f"cseq.{metric.name}", UNITS[metric.unit]
        meter.create_observable_counter(name, [observe], unit, metric.text)
    for metric in HISTOGRAMS:
        name, unit = f"cseq.{metric.name}", UNITS[metric.unit]
        observe = partial(observe_total, read, metric.name, "sum")
        meter.create_observable_counter(f"{name}.time", [observe], unit, metric.text)
        observe = partial(observe_p99, read, metric, {})
        meter.create_observable_gauge(f"{name}.p99", [observe], unit, metric.text)
    for metric in GAUGES:
        observe = partial(observe_now, read, metric)
        name, unit = f"cseq.{metric.name}", UNITS[metric.unit]
        meter.create_observable_gauge(name, [observe], unit, metric.text)


def observe_total(
    read: dict[str, Totals], name: str, part: str | None, _: Any
) -> Iterator[Observation]:
    """Observe a number that only grows."""
    for loader, totals in read.items():
        total = totals.read()[1][name]
        yield Observation(float(total if part is None else total[part]), {"loader": loader})


def observe_p99(
    read: dict[str, Totals], metric: Metric, before: dict[str, Stats], _: Any
) -> Iterator[Observation]:
    """Observe a quantile of what has happened since `before`; nothing, if there was nothing."""
    for loader, totals in read.items():
        now, _ = totals.read()
        if now is not None:
            histogram = metric.read(added(before.get(loader), now))
            before[loader] = now
            if histogram.count:
                yield Observation(histogram.quantile(0.99), {"loader": loader})


def observe_now(read: dict[str, Totals], metric: Metric, _: Any) -> Iterator[Observation]:
    """Observe a number of this moment; nothing, if the loader has no workers now."""
    for loader, totals in read.items():
        now, _ = totals.read()
        if now is not None:
            yield Observation(float(metric.read(now)), {"loader": loader})
