"""The figures of a manager for OpenTelemetry."""

import numpy as np
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import cseq

# In production: PeriodicExportingMetricReader(OTLPMetricExporter()).
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))

manager = cseq.MPSequence(np.arange(6400), batch_size=32, out_type="null")
with manager.start() as batches:
    meter, before = metrics.get_meter("cseq"), batches.stats()
    for name in before.as_dict("cseq."):

        def observe(options, name=name):
            figures = batches.stats().since(before).as_dict("cseq.")
            return [metrics.Observation(figures[name])]

        meter.create_observable_gauge(name, [observe])
    for batch in batches:
        pass
    print(reader.get_metrics_data().to_json())
