"""The metrics of the last step in the text format of Prometheus, over HTTP on loopback."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from nemo_like.config.errors import ConfigError
from nemo_like.run.sinks import Media, Sink

_HOST = "127.0.0.1"


class PrometheusSink(Sink):
    """Answers requests on a port of loopback."""

    def __init__(self, port: int, run_name: str) -> None:
        self._run_name = run_name
        self._values: Mapping[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, _HOST, registry)

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


def check_port(port: int) -> None:
    """Raise ConfigError if the port cannot be used."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ConfigError(
                f"logger.prometheus_port: port {port} of {_HOST} cannot be used"
                f" ({error.strerror}); set it to a free port, or to null"
            ) from error
