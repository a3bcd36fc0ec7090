"""What a worker tells of itself: /metrics, /healthz, log lines, traces."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support import Fleet, WorkerProcess, enqueue, wait_for_end, wait_until

from leasetask import App, AsyncContext, Context, Retry
from leasetask.cli.logs import JsonLines
from leasetask.errors import ConfigurationError
from leasetask.monitor import Monitor
from leasetask.worker import WorkerOptions


@pytest.fixture
def fleet(dsn: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(dsn, tmp_path) as fleet:
        yield fleet


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def address_of(worker: WorkerProcess) -> str:
    """Wait until a worker says where it serves metrics."""
    said = r"http://(127\.0\.0\.1:\d+)/metrics"
    wait_until(lambda: re.search(said, worker.log), 20, "for the address")
    found = re.search(said, worker.log)
    assert found is not None
    return found[1]


def test_metrics_count_what_was_done(db: psycopg.Connection, fleet: Fleet) -> None:
    worker = fleet.start("outage", "--metrics", "127.0.0.1:0", "--concurrency", "7", lease=5)
    base = f"http://{address_of(worker)}"
    for number in range(5):
        enqueue(db, "quick", number)
    enqueue(db, "steps", 1)
    wait_for_end(db)
    wait_until(lambda: 'version="1"} 5.0' in get(f"{base}/metrics")[1], 10, "for the counts")
    status, text = get(f"{base}/metrics")
    assert status == 200
    assert 'leasetask_ends_total{kind="quick",status="succeeded",version="1"} 5.0' in text
    assert 'leasetask_ends_total{kind="steps",status="succeeded",version="1"} 1.0' in text
    assert 'leasetask_run_seconds_count{kind="quick",version="1"} 5.0' in text
    assert 'leasetask_wait_seconds_count{kind="steps",version="1"} 1.0' in text
    assert "leasetask_slots 7.0" in text
    assert "leasetask_running 0.0" in text
    assert "leasetask_healthy 1.0" in text
    assert get(f"{base}/healthz") == (200, "ok\n")
    assert get(f"{base}/nothing")[0] == 404


def test_healthz_is_red_while_it_drains(db: psycopg.Connection, fleet: Fleet) -> None:
    worker = fleet.start("outage", "--metrics", "127.0.0.1:0", lease=5)
    base = f"http://{address_of(worker)}"
    enqueue(db, "finishes")
    fleet.ledger.wait_for("finishes: begins")
    worker.terminate()
    wait_until(lambda: get(f"{base}/healthz")[0] == 503, 10, "for red")
    assert get(f"{base}/healthz")[1] == "it drains: it was told to stop\n"
    fleet.gate("go").touch()
    assert worker.wait() == 0


def test_healthz_is_red_when_claims_and_heartbeats_fail(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody locks the table: after a lease neither can be done, and each is told; then it is well."""
    monkeypatch.setattr("leasetask.worker._SILENT", 0.3)
    app = App(dsn)

    @app.task
    async def lasts(ctx: AsyncContext) -> None:
        await asyncio.sleep(60)

    worker = app.worker(WorkerOptions(concurrency=2, lease=0.5, poll_interval=0.05, grace=0))
    monitor = Monitor(worker, "127.0.0.1:0")
    assert get(f"http://{monitor.address}/healthz")[0] == 503, "it has not started"
    enqueue(db, "lasts")
    thread = threading.Thread(target=asyncio.run, args=(worker.serve(),))
    thread.start()
    try:
        wait_until(lambda: get(f"http://{monitor.address}/healthz")[0] == 200, 10, "for green")
        wait_until(lambda: worker.running == 1, 10)
        with psycopg.connect(dsn) as holder:
            holder.execute("lock table leasetask.task in access exclusive mode")
            health = f"http://{monitor.address}/healthz"
            wait_until(lambda: "its heartbeats do not get through" in get(health)[1], 10)
            wait_until(lambda: "no claim has been answered for" in get(health)[1], 10)
            holder.rollback()
        wait_until(lambda: get(health)[0] == 200, 10, "for green again")
    finally:
        worker.stop(hurry=True)
        thread.join()
        monitor.close()
        app.close()


@pytest.mark.parametrize("address", ["127.0.0.1:x", "no.such.host.invalid:1", "127.0.0.1:99999999"])
def test_an_address_that_cannot_be_had_is_told_in_a_line(dsn: str, address: str) -> None:
    app = App(dsn)
    with pytest.raises(ConfigurationError, match="give HOST:PORT"):
        Monitor(app.worker(WorkerOptions()), address)


def test_log_lines_as_json(db: psycopg.Connection, fleet: Fleet) -> None:
    """One object a line; a task's outcome carries its id, kind, attempt, status and duration."""
    worker = fleet.start("outage", "--log-format", "json", lease=5)
    task = enqueue(db, "quick", 1)
    wait_for_end(db)
    worker.terminate()
    worker.wait()
    lines = [json.loads(line) for line in worker.log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (outcome,) = [line for line in lines if line.get("task_id") == task]
    assert outcome["kind"] == "quick"
    assert outcome["attempt"] == outcome["run"] == outcome["version"] == 1
    assert outcome["status"] == "succeeded"
    assert 0 <= outcome["duration"] < 10


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise ValueError("line one\nline two")
    except ValueError as error:
        record = logging.getLogger("leasetask").makeRecord(
            "leasetask", logging.ERROR, "f", 1, "failed: %s", (error,), (type(error), error, None)
        )
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line)["traceback"].endswith("line two")


# --- traces ----------------------------------------------------------------------------------------


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Set tracing up for one test: OpenTelemetry itself takes one provider for a process's life."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_a_trace_goes_from_the_enqueue_to_the_steps(
    dsn: str, db: psycopg.Connection, exporter: InMemorySpanExporter
) -> None:
    """Also over a wait, and into a task that the handler enqueues."""
    app = App(dsn)

    @app.task
    async def child(ctx: AsyncContext, number: int) -> None:
        await ctx.step("inner", lambda: None)

    @app.task
    def parent(ctx: Context, number: int) -> None:
        ctx.step("first", lambda: None)
        ctx.sleep(0.05)
        ctx.step("second", lambda: None)
        ctx.enqueue("child", child, number)

    with trace.get_tracer("test").start_as_current_span("request") as request:
        task = app.enqueue(parent, 1)
    with app.start(concurrency=4, lease=5):
        assert wait_for_end(db) == {"succeeded": 2}
    app.close()
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    every = [span for group in spans.values() for span in group]
    assert {span.context.trace_id for span in every} == {request.get_span_context().trace_id}
    (create,) = spans["create parent"]
    assert create.kind is trace.SpanKind.PRODUCER
    runs = spans["process parent"]
    assert len(runs) == 2, "one before the sleep and one after"
    assert {run.parent.span_id for run in runs if run.parent} == {create.context.span_id}
    assert all(run.attributes and run.attributes["messaging.message.id"] == task.id for run in runs)
    (second,) = spans["step second"]
    assert second.parent is not None
    assert second.parent.span_id == runs[1].context.span_id
    (inner,) = spans["step inner"]
    (inner_run,) = spans["process child"]
    assert inner.parent is not None
    assert inner.parent.span_id == inner_run.context.span_id


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_trace_shows_the_error_that_was_raised(
    dsn: str, db: psycopg.Connection, exporter: InMemorySpanExporter
) -> None:
    """One whose text cannot be had is neither replaced, in the task or in its trace, nor left out."""
    app = App(dsn)

    @app.task(retry=Retry(max_attempts=1))
    def handler(ctx: Context) -> None:
        raise Unprintable

    app.enqueue(handler)
    with app.start(concurrency=4, lease=5):
        assert wait_for_end(db) == {"failed": 1}
    app.close()
    assert db.execute("select last_error->>'type' from leasetask.task").fetchone() == (
        "Unprintable",
    )
    (run,) = (span for span in exporter.get_finished_spans() if span.name == "process handler")
    assert run.status.status_code is trace.StatusCode.ERROR
    (event,) = run.events
    assert event.attributes is not None
    assert event.attributes["exception.type"] == "Unprintable"
    assert "RuntimeError" in str(event.attributes["exception.message"])


def test_a_wait_is_no_error_in_a_trace(
    dsn: str, db: psycopg.Connection, exporter: InMemorySpanExporter
) -> None:
    app = App(dsn)

    @app.task
    def handler(ctx: Context) -> None:
        ctx.sleep(0.05)

    app.enqueue(handler)
    with app.start(concurrency=4, lease=5):
        assert wait_for_end(db) == {"succeeded": 1}
    app.close()
    runs = [span for span in exporter.get_finished_spans() if span.name == "process handler"]
    assert [run.status.status_code for run in runs] == [trace.StatusCode.UNSET] * 2
