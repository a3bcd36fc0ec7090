"""`/metrics` for Prometheus and `/healthz` of one worker, on a port of its own (extra `metrics`)."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from leasetask.errors import ConfigurationError
from leasetask.telemetry import Ended
from leasetask.worker import Worker

try:
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        generate_latest,
    )

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0, 3600.0)
"""Upper bounds of the histograms' buckets: a task takes milliseconds or an hour."""


class Monitor:
    """Serves what one worker does.

    Args:
        address: `HOST:PORT`, or a port of 127.0.0.1.

    Raises:
        ConfigurationError: the address cannot be had, or prometheus_client is not installed.
    """

    def __init__(self, worker: Worker, address: str) -> None:
        if not AVAILABLE:
            raise ConfigurationError("--metrics needs `pip install 'leasetask[metrics]'`")
        self._worker = worker
        self._registry = CollectorRegistry()
        self._count(worker)
        host, _, port = address.rpartition(":")
        try:
            self._server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), self._handler())
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"--metrics {address}: {error}; give HOST:PORT") from None
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, name="leasetask-metrics", daemon=True
        ).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()

    def _count(self, worker: Worker) -> None:
        labels = ("kind", "version")
        ends = Counter(
            "leasetask_ends", "Runs by the task's status afterwards", (*labels, "status"),
            registry=self._registry,
        )  # fmt: skip
        ran = Histogram(
            "leasetask_run_seconds", "From the claim to the end of a run", labels,
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        waited = Histogram(
            "leasetask_wait_seconds", "From when a task was due to its claim", labels,
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip

        def count(ended: Ended) -> None:
            ends.labels(ended.kind, ended.version, ended.status).inc()
            ran.labels(ended.kind, ended.version).observe(ended.ran)
            waited.labels(ended.kind, ended.version).observe(max(0.0, ended.waited))

        worker.on_end.append(count)
        running = Gauge(
            "leasetask_running", "Tasks in this worker's hands", registry=self._registry
        )
        running.set_function(lambda: worker.running)
        slots = Gauge("leasetask_slots", "Tasks it may run at a time", registry=self._registry)
        slots.set(worker.slots)
        healthy = Gauge("leasetask_healthy", "Whether /healthz is 200", registry=self._registry)
        healthy.set_function(lambda: float(not worker.troubles()))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        monitor = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, generate_latest(monitor._registry), CONTENT_TYPE_LATEST)
                elif self.path == "/healthz":
                    troubles = monitor._worker.troubles()
                    text = "\n".join(troubles or ["ok"]) + "\n"
                    self._answer(
                        503 if troubles else 200, text.encode(), "text/plain; charset=utf-8"
                    )
                else:
                    self._answer(404, b"/metrics or /healthz\n", "text/plain; charset=utf-8")

            def _answer(self, status: int, body: bytes, type_: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", type_)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """A look every few seconds is no news."""

        return Handler
