"""`step`: a named piece of a handler whose result is recorded; and what every recorded verb shares."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from leasetask.errors import (
    ConfigurationError,
    IdempotencyConflict,
    LeaseLost,
    NonDeterminismError,
    NonRetryable,
    ReplayError,
    StepFailed,
    TaskCanceled,
    UnknownKind,
)
from leasetask.failures import describe
from leasetask.journal import COMPENSATED, REGISTERED, Record
from leasetask.model import Checkpoint, Retry
from leasetask.operations import AwaitCancellation, Body, Gate, Send, Stand, Verb, in_body
from leasetask.payload import annotation_of, convert, decode, encode, fingerprint
from leasetask.run import Compensation, Run, StepRetry

logger = logging.getLogger("leasetask")

T = TypeVar("T")


_HOPELESS = (NonRetryable, ConfigurationError, IdempotencyConflict, UnknownKind)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The keyword arguments of `step` and its kin."""

    retry: Retry | None = None
    retry_on: tuple[type[Exception], ...] = ()
    timeout: float | None = None
    inserted: bool = False
    compensate: Callable[..., Any] | None = None


DEFAULTS = StepOptions()


def step(
    run: Run,
    name: str,
    function: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: StepOptions,
) -> Verb[T]:
    """Run a step's body once and record its result; replay the record ever after."""
    check_name(run, name)
    record = run.journal.ask(name)
    type_ = annotation_of(function)
    arguments = fingerprint(args, kwargs)
    if record is not None:
        compare_arguments(run, name, record, arguments)
        value = yield from replay(name, record, type_)
    else:
        yield from start(run, name, options.inserted)
        extra = {} if arguments is None else {"args": arguments}
        body = Body(function, args, kwargs, options.timeout or run.kind.timeout, name)
        value = yield from perform(run, name, body, type_, options, extra)
    if options.compensate is not None:
        run.register(Compensation(name, options.compensate, (value,)))
    return value  # type: ignore[no-any-return]  # what the function's annotation says


def check_name(run: Run, name: str) -> None:
    """Refuse a verb that may not be used here, or under this name."""
    run.check_usable()
    if in_body.get():
        raise ConfigurationError(f"step {name!r}: a step's body may not use verbs of its context")
    if not name or name.startswith((REGISTERED, COMPENSATED)):
        raise ConfigurationError(f"{name!r} cannot be a step's name")
    if not (isinstance(name, str) and name.isascii() and name.isprintable()):
        encode(name, what="a step's name")  # text that JSON and PostgreSQL can keep


def start(run: Run, name: str, inserted: bool) -> Verb[None]:
    """Let an unrecorded step begin, or say why it may not."""
    if not inserted and not run.journal.complete:
        yield Gate(name)
    run.check_startable()
    yield from record_cancelled(run)


def compare_arguments(run: Run, name: str, record: Record, arguments: str | None) -> None:
    """Report a replay that asks for a recorded step with other arguments."""
    if arguments == record.get("args") or "ok" not in record:
        return
    message = (
        f"task {run.claimed.id}: step {name!r} is asked for with other arguments than those it "
        "ran with; its recorded result is used"
    )
    if run.kind.strict:
        raise NonDeterminismError(message)
    logger.warning(message)


def replay(name: str, record: Record, type_: Any) -> Verb[Any]:
    """Do again what the record of a step says."""
    if "error" in record:
        raise StepFailed(name, record["n"], record["error"])
    if "cancelled" in record:
        yield AwaitCancellation()
    return convert(record["ok"], type_, what=f"recorded result of step {name!r}")


def perform(
    run: Run, name: str, body: Body, type_: Any, options: StepOptions, extra: Record
) -> Verb[Any]:
    """Run a step's body and record how it ended."""
    began = time.monotonic()
    try:
        value = yield body
        encoded = encode(value, type_, what=f"result of step {name!r}", limit=run.payload_limit)
    except asyncio.CancelledError:
        cancelled(run, name, {})
        raise
    except (LeaseLost, TaskCanceled, ReplayError):
        raise
    except Exception as error:
        yield from failed(run, name, error, options)
    milliseconds = round((time.monotonic() - began) * 1000)
    if milliseconds:
        extra = {**extra, "ms": milliseconds}
    if tries := run.journal.open_step(name).get("tries"):
        extra = {**extra, "tries": int(tries) + 1}
    if options.compensate is not None:
        extra = {**extra, "compensate": True}
    return (yield from write_record(run, name, encoded, type_, extra))


def cancelled(run: Run, name: str, extra: Record) -> None:
    """Note that a step was cancelled from within the handler, by a time-out of its own, say.

    Recorded only once the handler goes on: one that ends with an error is replayed, and there the
    step has to run, for what cancelled it need not come again.
    """
    if not run.interrupted:
        record = {"n": run.journal.next_number(), "cancelled": True, **extra}
        run.cancelled_steps[name] = to_json(record)


def record_cancelled(run: Run) -> Verb[None]:
    """Record what was cancelled before this verb, so that a replay meets it there."""
    while run.cancelled_steps:
        name = next(iter(run.cancelled_steps))
        yield Send(Checkpoint({name: run.cancelled_steps.pop(name)}))


def record_text(run: Run, encoded: str, extra: Record) -> str:
    """Return the JSON of a step's record; its result is encoded already."""
    more = "," + to_json(extra)[1:-1] if extra else ""
    return f'{{"n":{run.journal.next_number()},"ok":{encoded}{more}}}'


def write_record(run: Run, name: str, encoded: str, type_: Any, extra: Record) -> Verb[Any]:
    """Commit a step's result, and return what every replay will."""
    record = record_text(run, encoded, extra)
    # An effect has been counted at its start.
    registered = int("compensate" in extra and "started" not in extra)
    ack = yield Send(Checkpoint({name: record}, registered))
    if ack.answer == "already":
        return convert(ack.recorded[name]["ok"], type_, what=f"recorded result of step {name!r}")
    return decode(encoded, type_, what=f"result of step {name!r}")


def again(run: Run, name: str, error: Exception, options: StepOptions) -> StepRetry | None:
    """Return how a step that raised is to be tried again; None: not at all."""
    policy = options.retry or run.kind.retry
    tries = _tries(run, name)
    hopeless = isinstance(error, _HOPELESS) or (
        options.retry_on and not isinstance(error, options.retry_on)
    )
    if hopeless or tries >= policy.max_attempts:
        return None
    delay = policy.delay(tries) * random.uniform(1 - policy.jitter, 1 + policy.jitter)
    known = run.journal.open_step(name)
    return StepRetry(name, delay, {**known, "tries": tries, "error": describe(error, tries)})


def failed(
    run: Run, name: str, error: Exception, options: StepOptions, extra: Record | None = None
) -> Verb[None]:
    """Leave a step that raised to a later try, or record that it failed for good."""
    later = again(run, name, error, options)
    if later is not None:
        yield Stand(later)
    tries = _tries(run, name)
    described = describe(error, tries)
    number = run.journal.next_number()
    record = {"n": number, "error": described, "tries": tries, **(extra or {})}
    yield Send(Checkpoint({name: to_json(record)}))
    raise StepFailed(name, number, described) from error


def _tries(run: Run, name: str) -> int:
    return int(run.journal.open_step(name).get("tries", 0)) + 1


def to_json(value: Any) -> str:
    """Return a value of ours as JSON text."""
    return msgspec.json.encode(value).decode()
