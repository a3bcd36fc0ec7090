"""The producers' calls, written once: each is a query and how to read its rows."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from leasetask import protocol, telemetry
from leasetask.connection import first, translated
from leasetask.errors import (
    IdempotencyConflict,
    LeaseTaskError,
    PayloadError,
    TaskNotFound,
    WaitTimeout,
)
from leasetask.model import LONGEST, Enqueued, TaskView
from leasetask.payload import DEFAULT_LIMIT, encode, name_in_a_line
from leasetask.protocol import KindPolicy, Query
from leasetask.registry import Kind

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]
Call = Generator[Query, Rows, T]
"""Yields queries, is sent their rows, returns what the caller gets."""

NAME_LIMIT = 1000
"""Longest kind, key or topic, in bytes of UTF-8: they stand in indexes."""


def run(call: Call[T], execute: Callable[[Query], Rows], task_id: str | None = None) -> T:
    """Drive a call; `execute` runs one query on whatever connection there is."""
    try:
        query = next(call)
        while True:
            query = call.send(execute(query))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # the generator's own T
    except LeaseTaskError:
        raise
    except Exception as error:
        raise translated(error, task_id=task_id) or error from error


async def run_async(call: Call[T], execute: Any, task_id: str | None = None) -> T:
    """Drive a call with an async `execute`."""
    try:
        query = next(call)
        while True:
            query = call.send(await execute(query))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # the generator's own T
    except LeaseTaskError:
        raise
    except Exception as error:
        raise translated(error, task_id=task_id) or error from error


# --- enqueue -----------------------------------------------------------------------------------


def enqueue(
    kind: str,
    policy: KindPolicy | None,
    encoded: str,
    key: str | None,
    at: datetime | None,
    delay: float | None,
    priority: int | None,
) -> Call[Enqueued]:
    """Enqueue one task, or find the one that has its key.

    Raises:
        IdempotencyConflict: the key names a task with another input.
    """
    check_start(at, delay)
    with telemetry.sending(kind) as trace:
        rows = yield protocol.enqueue(
            kind, encoded, key, policy, at=at, delay=delay, priority=priority, trace=trace
        )
    task_id, outcome, stored = rows[0]
    if outcome == "conflict":
        raise IdempotencyConflict(
            f"key {key!r} of kind {name_in_a_line(kind)} names task {task_id}, which has another input"
            f"{_difference(encoded, stored)}; use another key, or the same input",
            task_id=task_id,
        )
    return Enqueued(task_id, outcome)


def enqueue_many(
    kind: str,
    policy: KindPolicy | None,
    encoded: list[str],
    keys: list[str | None],
    at: datetime | None,
    delay: float | None,
    priority: int | None,
) -> Call[list[Enqueued]]:
    """Enqueue many in one statement; a conflict is an outcome."""
    check_start(at, delay)
    if not encoded:
        return []
    with telemetry.sending(kind) as trace:
        rows = yield protocol.enqueue_many(
            kind, encoded, keys, policy, at=at, delay=delay, priority=priority, trace=trace
        )
    return [Enqueued(task_id, outcome) for task_id, outcome, _ in rows]


def encode_input(kind: Kind, value: object, limit: int, where: str = "") -> str:
    """Encode an input through its kind's annotation; raises PayloadError."""
    return encode(value, kind.input_type, what=f"input of {kind.name}{where}", limit=limit)


def check_name(what: str, name: object) -> str:
    """Return a kind, key or topic that PostgreSQL can store and index; raises PayloadError."""
    if not isinstance(name, str):
        raise PayloadError(f"a {what} is text, not {type(name).__name__}")
    encoded = encode(name, what=what)
    size = len(encoded.encode()) - 2
    if not 1 <= size <= NAME_LIMIT:
        raise PayloadError(f"a {what} has 1 to {NAME_LIMIT} bytes; this has {size}")
    return name


def check_start(at: datetime | None, delay: float | None) -> None:
    """Refuse a start that names no moment; raises PayloadError."""
    if at is not None and delay is not None:
        raise PayloadError("a start has at or delay, not both")
    if delay is not None and not abs(delay) <= LONGEST:
        raise PayloadError(f"delay={delay}: at most {LONGEST:.0f} seconds")
    if at is not None and at.tzinfo is None:
        raise PayloadError(
            f"at={at.isoformat()} has no time zone; write datetime.now(timezone.utc) or the like"
        )


def _difference(new: str, stored: str | None) -> str:
    if stored is None:
        return ""
    found = first_difference(msgspec.json.decode(stored), msgspec.json.decode(new), "$")
    return f" (first difference at {found})" if found else ""


def first_difference(old: Any, new: Any, path: str) -> str | None:
    """Say where two JSON values first differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in old or key not in new:
                return f"{path}.{key}: only in the {'new' if key in new else 'old'} input"
            if found := first_difference(old[key], new[key], f"{path}.{key}"):
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return next(
            (d for i, (a, b) in pairs if (d := first_difference(a, b, f"{path}[{i}]"))), None
        )
    return None if old == new else f"{path}: {old!r:.60} and now {new!r:.60}"


# --- the rest ----------------------------------------------------------------------------------


def task_id(value: object) -> str:
    """Return a task id as canonical text; raises ValueError if it is no uuid."""
    try:
        return str(uuid.UUID(str(value)))
    except ValueError:
        raise ValueError(f"{value!r} is not a task id (a uuid)") from None


def get(id_: str) -> Call[TaskView]:
    """Read one task; raises TaskNotFound."""
    rows = yield protocol.get(id_)
    if not rows:
        raise TaskNotFound(f"no task {id_}; `leasetask list` shows what there is")
    return protocol.task_view(rows[0])


def cancel(id_: str, reason: str | None) -> Call[str]:
    """Cancel one task; raises TaskNotFound."""
    return str(first((yield protocol.cancel(id_, reason))))


def retry(id_: str) -> Call[None]:
    """Give a dead letter another chance; raises TaskNotFound, TaskRefused."""
    yield protocol.retry(id_)


def resolve(id_: str, step: str, done: object, redo: bool, limit: int) -> Call[None]:
    """Decide on an effect that nobody can tell about; raises TaskNotFound, TaskRefused."""
    encoded = None if redo else encode(done, what=f"result of effect {step!r}", limit=limit)
    yield protocol.resolve(id_, step, encoded)


def signal(
    topic: str, payload: object, sticky: bool, limit: int, outside: bool
) -> Call[int | None]:
    """Send a signal; outside a transaction, deliver it too and count whom it woke."""
    check_name("topic", topic)
    encoded = (
        None
        if payload is None
        else encode(payload, what=f"signal on {name_in_a_line(topic)}", limit=limit)
    )
    if not outside:
        yield protocol.signal(topic, encoded, sticky)
        return None
    sent: int
    woken: int
    sent, woken = (yield protocol.signal_now(topic, encoded, sticky))[0]
    for _ in range(100):
        _, count, again = (yield protocol.deliver([topic]))[0]
        woken += count
        if not again:
            break
        if not count:
            yield protocol.PAUSE  # somebody holds a row; if it lasts, a worker delivers
    if not woken:
        # A worker may have been faster and have delivered it.
        woken = int(first((yield protocol.is_consumed(sent))))
    return woken


def clear_signal(topic: str) -> Call[bool]:
    """End a latch."""
    check_name("topic", topic)
    return bool(first((yield protocol.clear_signal(topic))))


def wait_pauses(id_: str, timeout: float | None) -> Generator[float, None, None]:
    """Give the pauses between looks at a task, in seconds; raises WaitTimeout at the end."""
    waited, pause = 0.0, 0.01
    while timeout is None or waited < timeout:
        yield pause if timeout is None else min(pause, timeout - waited)
        waited += pause
        pause = min(pause * 1.5, 0.5)
    raise WaitTimeout(f"task {id_} has not ended within {timeout} s; it goes on")


__all__ = ["DEFAULT_LIMIT", "Call", "encode", "run", "run_async"]
