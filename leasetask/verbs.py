"""What the verbs of a handler do, written once for `def` and `async def`.

A verb is a generator: it decides, and yields an `Operation` for whatever takes time. A driver runs
it: `drive` blocks the handler's thread, `drive_async` awaits. Neither decides anything.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import msgspec

from leasetask.errors import (
    ConcurrentWait,
    ConfigurationError,
    LeaseLost,
    NonDeterminismError,
    NonRetryable,
    ReplayError,
    RunTimeout,
    SignalTimeout,
    StepFailed,
    TaskCanceled,
)
from leasetask.journal import COMPENSATED, REGISTERED, Record
from leasetask.model import Ack, Checkpoint, Note, Retry, Wait
from leasetask.payload import annotation_of, convert, decode, encode, fingerprint, printable
from leasetask.run import Compensation, Parked, Run, StepRetry, Suspended

logger = logging.getLogger("leasetask")

T = TypeVar("T")
_in_body: ContextVar[bool] = ContextVar("leasetask_in_body", default=False)


class Operation(Protocol):
    """What a verb waits for, in either colour."""

    def block(self, run: Run) -> Any:
        """Do it in the handler's thread."""

    async def wait(self, run: Run) -> Any:
        """Do it in the event loop."""


Verb = Generator[Operation, Any, T]


def drive(run: Run, verb: Verb[T]) -> T:
    """Run a verb in a sync handler's thread."""
    resume: Callable[[Any], Operation] = verb.send
    value: Any = None
    while True:
        try:
            operation = resume(value)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # the generator's own T
        try:
            resume, value = verb.send, operation.block(run)
        except BaseException as error:
            resume, value = verb.throw, error


async def drive_async(run: Run, verb: Verb[T]) -> T:
    """Run a verb in an async handler's task."""
    resume: Callable[[Any], Operation] = verb.send
    value: Any = None
    while True:
        try:
            operation = resume(value)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # the generator's own T
        try:
            resume, value = verb.send, await operation.wait(run)
        except BaseException as error:
            resume, value = verb.throw, error


async def within(seconds: float | None, awaitable: Awaitable[T], what: str) -> T:
    """Await something for so many seconds at the most; raises RunTimeout."""
    if seconds is None:
        return await awaitable
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError as error:
        if limit.expired():
            raise RunTimeout(f"{what} ran longer than its timeout of {seconds} s") from error
        raise


# --- operations ----------------------------------------------------------------------------


@dataclass(slots=True)
class Gate:
    """Lets the body of an unrecorded step start once all that is recorded was asked for."""

    name: str

    def block(self, run: Run) -> None:
        """A sync handler has one branch: what it has not asked for by now, it will not."""
        if not run.journal.complete:
            raise run.journal.accusation(self.name)

    async def wait(self, run: Run) -> None:
        """Other branches may still ask."""
        if not run.journal.complete:
            assert run.branches is not None
            await run.branches.gate(self.name)


@dataclass(slots=True)
class Body:
    """The user's function of a step."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    def block(self, run: Run) -> Any:
        """A thread cannot be stopped: the executor looks at `times_out_at` from outside."""
        token = _in_body.set(True)
        outer = run.times_out_at
        if self.timeout is not None:
            run.times_out_at = min(outer or float("inf"), time.monotonic() + self.timeout)
        try:
            return self.function(*self.args, **self.kwargs)
        finally:
            run.times_out_at = outer
            _in_body.reset(token)

    async def wait(self, run: Run) -> Any:
        """A `def` body runs in the event loop, as any function that a coroutine calls."""
        token = _in_body.set(True)
        try:
            value = self.function(*self.args, **self.kwargs)
            if inspect.isawaitable(value):
                value = await within(self.timeout, value, "a step")
            return value
        finally:
            _in_body.reset(token)


@dataclass(slots=True)
class Send:
    """A checkpoint or note, committed with others that are ready."""

    request: Checkpoint | Note

    def block(self, run: Run) -> Ack:
        """Hand it to the event loop and wait for the answer."""
        return _from_thread(run, run.port.send(run, self.request))

    async def wait(self, run: Run) -> Ack:
        """Shielded: what is on its way to the server is not undone by a cancellation here."""
        return await run.port.send(run, self.request)


@dataclass(slots=True)
class Snapshot:
    """The server's snapshot, taken before a `wait_for`'s check."""

    def block(self, run: Run) -> str:
        """Ask from the handler's thread."""
        return _from_thread(run, run.port.snapshot())

    async def wait(self, run: Run) -> str:
        """Ask from the event loop."""
        return await run.port.snapshot()


@dataclass(slots=True)
class Stand:
    """The branch waits for what only a later run can see."""

    parked: Parked

    def block(self, run: Run) -> None:
        """Unwind the handler."""
        run.park(self.parked)
        raise Suspended

    async def wait(self, run: Run) -> None:
        """Park; the executor drops the handler when every branch stands."""
        assert run.branches is not None
        run.park(self.parked)
        await run.branches.stand()


@dataclass(slots=True)
class AwaitCancellation:
    """Replays a step that was cancelled from inside the handler: the same canceller will come."""

    def block(self, run: Run) -> None:
        """No sync step is ever recorded so."""
        raise NonDeterminismError(f"task {run.claimed.id}: recorded by an async handler")

    async def wait(self, run: Run) -> None:
        """Wait for it."""
        await run.loop.create_future()


def _from_thread(run: Run, coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, run.loop).result()


# --- step ------------------------------------------------------------------------------------


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
    _check_name(run, name)
    record = run.journal.ask(name)
    type_ = annotation_of(function)
    arguments = fingerprint(args, kwargs)
    if record is not None:
        _compare_arguments(run, name, record, arguments)
        value = yield from _replay(name, record, type_)
    else:
        yield from _start(run, name, options.inserted)
        extra = {} if arguments is None else {"args": arguments}
        body = Body(function, args, kwargs, options.timeout or run.kind.timeout)
        value = yield from _perform(run, name, body, type_, options, extra)
    if options.compensate is not None:
        run.compensations.append(Compensation(name, options.compensate, (value,)))
    return value  # type: ignore[no-any-return]  # what the function's annotation says


def _check_name(run: Run, name: str) -> None:
    run.check_usable()
    if _in_body.get():
        raise ConfigurationError(f"step {name!r}: a step's body may not use verbs of its context")
    if not name or name.startswith((REGISTERED, COMPENSATED)):
        raise ConfigurationError(f"{name!r} cannot be a step's name")


def _start(run: Run, name: str, inserted: bool) -> Verb[None]:
    if not inserted:
        yield Gate(name)
    run.check_startable()


def _compare_arguments(run: Run, name: str, record: Record, arguments: str | None) -> None:
    if arguments == record.get("args") or "ok" not in record:
        return
    message = (
        f"task {run.claimed.id}: step {name!r} is asked for with other arguments than those it "
        "ran with; its recorded result is used"
    )
    if run.kind.strict:
        raise NonDeterminismError(message)
    logger.warning(message)


def _replay(name: str, record: Record, type_: Any) -> Verb[Any]:
    if "error" in record:
        raise StepFailed(name, record["n"], record["error"])
    if "cancelled" in record:
        yield AwaitCancellation()
    return convert(record["ok"], type_, what=f"recorded result of step {name!r}")


def _perform(
    run: Run, name: str, body: Body, type_: Any, options: StepOptions, extra: Record
) -> Verb[Any]:
    began = time.monotonic()
    try:
        value = yield body
        encoded = encode(value, type_, what=f"result of step {name!r}", limit=run.payload_limit)
    except asyncio.CancelledError:
        if not run.interrupted:
            cancelled = _json({"n": run.journal.next_number(), "cancelled": True})
            yield Send(Checkpoint({name: cancelled}))
        raise
    except (LeaseLost, TaskCanceled, ReplayError):
        raise
    except Exception as error:
        yield from _failed(run, name, error, options)
    milliseconds = round((time.monotonic() - began) * 1000)
    if milliseconds:
        extra = {**extra, "ms": milliseconds}
    if options.compensate is not None:
        extra = {**extra, "compensate": True}
    return (yield from _record(run, name, encoded, type_, extra))


def _record(run: Run, name: str, encoded: str, type_: Any, extra: Record) -> Verb[Any]:
    more = "," + _json(extra)[1:-1] if extra else ""
    record = f'{{"n":{run.journal.next_number()},"ok":{encoded}{more}}}'
    ack = yield Send(Checkpoint({name: record}, 1 if "compensate" in extra else 0))
    if ack.answer == "already":
        return convert(ack.recorded[name]["ok"], type_, what=f"recorded result of step {name!r}")
    return decode(encoded, type_, what=f"result of step {name!r}")


def _failed(run: Run, name: str, error: Exception, options: StepOptions) -> Verb[None]:
    policy = options.retry or run.kind.retry
    tries = int(run.journal.open_step(name).get("tries", 0)) + 1
    described = describe(error, tries)
    hopeless = isinstance(error, NonRetryable | ConfigurationError) or (
        options.retry_on and not isinstance(error, options.retry_on)
    )
    if not hopeless and tries < policy.max_attempts:
        delay = policy.delay(tries) * random.uniform(1 - policy.jitter, 1 + policy.jitter)
        note = {**run.journal.open_step(name), "tries": tries, "error": described}
        yield Stand(StepRetry(name, delay, note))
    number = run.journal.next_number()
    yield Send(Checkpoint({name: _json({"n": number, "error": described, "tries": tries})}))
    raise StepFailed(name, number, described) from error


def describe(error: BaseException, attempt: int) -> Record:
    """Return what is recorded of an exception, whatever it does when it is looked at."""
    try:
        message = str(error)
    except Exception as broken:
        message = f"<its text cannot be had: {type(broken).__name__}>"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:
        trace = "".join(traceback.format_tb(error.__traceback__))
    return {
        "type": printable(type(error).__qualname__, 200),
        "message": printable(message),
        "traceback": printable(trace),
        "attempt": attempt,
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# --- waits -----------------------------------------------------------------------------------


def sleep(run: Run, seconds: float, name: str | None) -> Verb[None]:
    """Free the worker and go on after so many seconds."""
    name = name or run.journal.next_name("sleep")
    _check_name(run, name)
    if run.journal.ask(name) is None:
        yield from _start(run, name, False)
        yield _stand_at(run, Wait("sleep", name), seconds)


def wait_signal(
    run: Run, topic: str, timeout: float | None, name: str | None, type_: Any
) -> Verb[Any]:
    """Consume one signal of a topic, sent before, during or after."""
    name = name or run.journal.next_name("wait")
    _check_name(run, name)
    record = run.journal.ask(name)
    if record is None:
        yield from _start(run, name, False)
        yield _stand_at(run, Wait("signal", name, topic=topic), timeout)
        raise AssertionError("a stand never returns")
    if "timeout" in record:
        message = f"task {run.claimed.id}: no signal on {topic!r} in time ({name!r})"
        raise SignalTimeout(message, step=name, number=record["n"])
    return convert(record["ok"], type_, what=f"signal on {topic!r}")


def wait_for(
    run: Run, name: str, check: Callable[[], T], topic: str, every: float, options: StepOptions
) -> Verb[T]:
    """Look, and wait for a hint or `every` seconds before looking again, until there is a result."""
    _check_name(run, name)
    record = run.journal.ask(name)
    type_ = annotation_of(check)
    if record is not None:
        return (yield from _replay(name, record, type_))  # type: ignore[no-any-return]  # as annotated
    yield from _start(run, name, options.inserted)
    snapshot = yield Snapshot()
    try:
        value = yield Body(check, (), {}, options.timeout or run.kind.timeout)
        encoded = encode(value, type_, what=f"result of {name!r}", limit=run.payload_limit)
    except (LeaseLost, TaskCanceled, ReplayError):
        raise
    except Exception as error:
        yield from _failed(run, name, error, options)
    if not value:
        yield _stand_at(run, Wait("hurry", name, topic=topic, snapshot=snapshot), every)
    return (yield from _record(run, name, encoded, type_, {}))  # type: ignore[no-any-return]  # as annotated


def _stand_at(run: Run, wait: Wait, seconds: float | None) -> Stand:
    if any(isinstance(parked, Wait) for parked in run.parked):
        raise ConcurrentWait(
            f"task {run.claimed.id} already waits; one wait at a time, {wait.name!r} has to follow"
        )
    if wait.mode != "hurry":
        wait.seq = run.journal.next_number()
    wait.until = run.wait_until(wait.name, seconds)
    return Stand(wait)


# --- compensation ----------------------------------------------------------------------------


def compensate(
    run: Run, name: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Verb[None]:
    """Register what to call if the task is canceled or fails for good; a checkpoint of its own.

    Also while a cancel is pending: what it undoes has been done.
    """
    _check_name(run, name)
    record = run.journal.ask(REGISTERED + name)
    if record is None:
        yield Gate(REGISTERED + name)
        run.check_usable()
        number = run.journal.next_number()
        yield Send(Checkpoint({REGISTERED + name: _json({"n": number, "compensate": True})}, 1))
    run.compensations.append(Compensation(name, function, args))


def run_compensations(run: Run) -> Verb[None]:
    """Run what is outstanding, last registered first, as recorded, retried steps.

    Raises:
        NonDeterminismError: something registered was not registered again by the replay.
        StepFailed: one failed for good; the rest is not run.
    """
    registered = {c.name: c for c in run.compensations}
    outstanding = run.journal.outstanding()
    missing = [name for name in outstanding if name not in registered]
    if missing or not run.journal.complete:
        raise NonDeterminismError(
            f"{run.journal.accusation(None)}; compensations outstanding: {', '.join(outstanding)}"
        )
    for compensation in reversed(run.compensations):
        name = COMPENSATED + compensation.name
        record = run.journal.ask(name)
        if record is not None:
            yield from _replay(name, record, Any)
            continue
        body = Body(compensation.function, compensation.args, {}, run.kind.timeout)
        yield from _perform(run, name, body, annotation_of(compensation.function), DEFAULTS, {})
