"""The metrics of the last step in the text format of Prometheus, over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from nemo_like.run.sinks import Media, Sink


class PrometheusSink(Sink):
    """Answers requests at an address, (host, port)."""

    def __init__(self, address: tuple[str, int], run_name: str) -> None:
        self._run_name = run_name
        self._values: Mapping[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(address[1], address[0], registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for the registry."""
        for name, value in self._values.items():
            metric = "nemo_like_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            family = GaugeMetricFamily(metric, name, labels=["run"])
            family.add_metric([self._run_name], value)
            yield family

    def log(self, step: int, metrics: Mapping[str, float], media: Media) -> None:
        self._values = {"step": float(step), **metrics}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
