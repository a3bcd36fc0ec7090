"""Traces and metrics through OpenTelemetry, for programs that have set it up (extra `otel`).

Without it, or with its API alone, every function here does nothing. A task carries the trace context
of its enqueue (W3C traceparent), so its runs, in whatever process, belong to the producer's trace.
Names follow OpenTelemetry's semantic conventions for messaging, version 1.27.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from leasetask.failures import message_of, traceback_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

try:
    from opentelemetry import metrics, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    AVAILABLE = True
except ImportError:
    AVAILABLE = False


UNTRACED: AbstractContextManager[Any] = nullcontext()


class Ended(NamedTuple):
    """How one run of a task ended.

    Attributes:
        status: the task's status afterwards.
        ran: seconds from the claim to the end.
        waited: seconds from when it was due to the claim.
    """

    kind: str
    version: int
    status: str
    ran: float
    waited: float


def is_set_up() -> bool:
    """Whether the program has set tracing up."""
    return _tracer() is not None


def sending(kind: str) -> AbstractContextManager[str | None]:
    """Trace an enqueue; gives the traceparent to store with the task, None without a trace."""
    tracer = _tracer()
    return UNTRACED if tracer is None else _sending(tracer, kind)


def processing(
    kind: str, task_id: str, traceparent: str | None, attributes: dict[str, Any]
) -> AbstractContextManager[Any]:
    """Trace a run of a task, as a child of its enqueue."""
    tracer = _tracer()
    if tracer is None:
        return UNTRACED
    carrier = {} if traceparent is None else {"traceparent": traceparent}
    return _span(
        tracer,
        f"process {kind}",
        context=TraceContextTextMapPropagator().extract(carrier),
        kind=trace.SpanKind.CONSUMER,
        attributes={**_messaging(kind, "process"), "messaging.message.id": task_id, **attributes},
    )


def step(name: str) -> AbstractContextManager[Any]:
    """Trace the body of a step, where its run is traced."""
    if not AVAILABLE or not trace.get_current_span().is_recording():
        return UNTRACED
    return _span(trace.get_tracer("leasetask"), f"step {name}")


def count_end(ended: Ended) -> None:
    """Count the end of a run, and its times."""
    if AVAILABLE:
        attributes = {**_messaging(ended.kind, "process"), "leasetask.status": ended.status}
        instruments = _instruments()
        instruments["consumed"].add(1, attributes)
        instruments["duration"].record(ended.ran, attributes)


@contextmanager
def _sending(tracer: Tracer, kind: str) -> Iterator[str | None]:
    attributes = _messaging(kind, "create")
    with _span(tracer, f"create {kind}", kind=trace.SpanKind.PRODUCER, attributes=attributes):
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        yield carrier.get("traceparent")
    _instruments()["sent"].add(1, attributes)


@contextmanager
def _span(tracer: Tracer, name: str, **options: Any) -> Iterator[Span]:
    """Trace a block. Errors are noted here: the SDK replaces one whose text cannot be had."""
    with tracer.start_as_current_span(
        name, record_exception=False, set_status_on_exception=False, **options
    ) as span:
        try:
            yield span
        except Exception as error:
            _note_error(span, error)
            raise


def _note_error(span: Span, error: Exception) -> None:
    message = message_of(error)
    attributes = {
        "exception.type": type(error).__qualname__,
        "exception.message": message,
        "exception.stacktrace": traceback_of(error),
    }
    span.add_event("exception", attributes)
    span.set_status(trace.StatusCode.ERROR, f"{type(error).__qualname__}: {message}")


def _tracer() -> Tracer | None:
    """Return a tracer if the program has set tracing up."""
    if not AVAILABLE or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace.get_tracer("leasetask")


@cache
def _instruments() -> dict[str, Any]:
    meter = metrics.get_meter("leasetask")
    return {
        "sent": meter.create_counter("messaging.client.sent.messages", "{message}"),
        "consumed": meter.create_counter("messaging.client.consumed.messages", "{message}"),
        "duration": meter.create_histogram("messaging.process.duration", "s"),
    }


def _messaging(kind: str, operation: str) -> dict[str, Any]:
    return {
        "messaging.system": "leasetask",
        "messaging.destination.name": kind,
        "messaging.operation.type": operation,
    }
