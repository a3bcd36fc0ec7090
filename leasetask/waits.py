"""`sleep`, `wait_signal`, `wait_for`: the worker is free meanwhile, and no attempt is spent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from leasetask.errors import (
    ConcurrentWait,
    ConfigurationError,
    LeaseLost,
    ReplayError,
    SignalTimeout,
    TaskCanceled,
)
from leasetask.model import LONGEST, Wait
from leasetask.operations import Body, Snapshot, Stand, Verb
from leasetask.payload import annotation_of, convert, encode
from leasetask.run import Run
from leasetask.steps import (
    StepOptions,
    cancelled,
    check_name,
    failed,
    replay,
    start,
    write_record,
)

T = TypeVar("T")


def sleep(run: Run, seconds: float, name: str | None) -> Verb[None]:
    """Free the worker and go on after so many seconds."""
    name = name or run.journal.next_name("sleep")
    check_name(run, name)
    if run.journal.ask(name) is None:
        yield from start(run, name, False)
        yield _stand_at(run, Wait("sleep", name), seconds)


def wait_signal(
    run: Run, topic: str, timeout: float | None, name: str | None, type_: Any
) -> Verb[Any]:
    """Consume one signal of a topic, sent before, during or after."""
    name = name or run.journal.next_name("wait")
    check_name(run, name)
    record = run.journal.ask(name)
    if record is None:
        yield from start(run, name, False)
        yield _stand_at(run, Wait("signal", name, topic=topic), timeout)
        raise AssertionError("a stand never returns")
    if "timeout" in record:
        message = f"task {run.claimed.id}: no signal on {topic!r} in time ({name!r})"
        raise SignalTimeout(message, step=name, number=record["n"])
    return convert(record["ok"], type_, what=f"signal on {topic!r}")


def wait_for(
    run: Run, name: str, check: Callable[[], T], topic: str, every: float, options: StepOptions
) -> Verb[T]:
    """Look, and wait for a hint or `every` seconds before the next look, until there is a result."""
    check_name(run, name)
    record = run.journal.ask(name)
    type_ = annotation_of(check)
    if record is not None:
        return (yield from replay(name, record, type_))  # type: ignore[no-any-return]  # as annotated
    yield from start(run, name, options.inserted)
    try:
        snapshot = yield Snapshot()
        value = yield Body(check, (), {}, options.timeout or run.kind.timeout, name)
        encoded = encode(value, type_, what=f"result of {name!r}", limit=run.payload_limit)
    except asyncio.CancelledError:
        cancelled(run, name, {})
        raise
    except (LeaseLost, TaskCanceled, ReplayError):
        raise
    except Exception as error:
        yield from failed(run, name, error, options)
    if not value:
        yield _stand_at(run, Wait("hurry", name, topic=topic, snapshot=snapshot), every)
    return (yield from write_record(run, name, encoded, type_, {}))  # type: ignore[no-any-return]  # as annotated


def _stand_at(run: Run, wait: Wait, seconds: float | None) -> Stand:
    if any(isinstance(parked, Wait) for parked in run.parked):
        raise ConcurrentWait(
            f"task {run.claimed.id} already waits; one wait at a time, {wait.name!r} has to follow"
        )
    if seconds is not None and not abs(seconds) <= LONGEST:
        raise ConfigurationError(f"{wait.name}: {seconds} seconds; at most {LONGEST:.0f}")
    if wait.mode != "hurry":
        wait.seq = run.journal.next_number()
    wait.until = run.wait_until(wait.name, seconds)
    return Stand(wait)
