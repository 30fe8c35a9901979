"""The metrics of the last step in the text format of Prometheus, over HTTP on loopback."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from nemo_like.config.errors import ConfigError
from nemo_like.run.sinks import Media, Sink

_HOST = "127.0.0.1"


class PrometheusSink(Sink):
    """Answers GET /metrics on a port of loopback. Raises ConfigError if the port cannot be used."""

    def __init__(self, port: int, run_name: str) -> None:
        self._run_name = run_name
        self._text = ""
        self._server = _open_server(port, self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="prometheus", daemon=True
        )
        self._thread.start()

    @property
    def body(self) -> bytes:
        """The answer to a request."""
        return self._text.encode()

    def log(self, step: int, metrics: Mapping[str, float], media: Media) -> None:
        lines = []
        for name, value in {"step": float(step), **metrics}.items():
            metric = "nemo_like_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            lines.append(f"# TYPE {metric} gauge")
            lines.append(f'{metric}{{run="{self._run_name}"}} {_text(value)}')
        self._text = "\n".join([*lines, ""])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def check_port(port: int) -> None:
    """Raise ConfigError if the port cannot be used."""
    _open_server(port, None).server_close()


def _text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.9g}" if math.isfinite(value) else f"{'+' if value > 0 else '-'}Inf"


def _open_server(port: int, sink: PrometheusSink | None) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if sink is None or self.path != "/metrics":
                self.send_error(404)
                return
            body = sink.body
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    try:
        return ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"logger.prometheus_port: port {port} of {_HOST} cannot be used ({error.strerror});"
            " set it to a free port, or to null"
        ) from error
