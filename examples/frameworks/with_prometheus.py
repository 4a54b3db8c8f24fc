"""The figures of a manager for Prometheus."""

import numpy as np
import prometheus_client
from prometheus_client.core import GaugeMetricFamily

import cseq


class Figures:
    """The figures of a manager since they were last collected."""

    def __init__(self, manager):
        self.manager, self.before = manager, manager.stats()

    def collect(self):
        now = self.manager.stats()
        for name, value in now.since(self.before).as_dict("cseq_").items():
            yield GaugeMetricFamily(name, "See cseq.Stats.as_dict.", value=value)
        self.before = now


manager = cseq.MPSequence(np.arange(6400), batch_size=32, out_type="null")
with manager.start() as batches:
    prometheus_client.REGISTRY.register(Figures(batches))
    # Port 0 is any free port. Each rank needs its own, such as 9400 + rank.
    prometheus_client.start_http_server(0, "127.0.0.1")
    for batch in batches:
        pass
    print(prometheus_client.generate_latest().decode())
