"""One lease in, one outcome out: runs the handler and judges how it ended. Knows no database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from typing import Any

from leasetask import compensation, operations, telemetry
from leasetask.branches import Branches
from leasetask.context import AsyncContext, Context
from leasetask.effects import unknown
from leasetask.errors import (
    ConfigurationError,
    EffectUnknown,
    LeaseLost,
    NonRetryable,
    PayloadError,
    ReplayError,
    RunTimeout,
    SignalTimeout,
    StepFailed,
    SuspensionSwallowed,
    TaskCanceled,
)
from leasetask.failures import describe
from leasetask.model import Completed, Fail, Finish, Lost, Outcome, Release, Suspend, Wait
from leasetask.payload import convert, encode
from leasetask.run import HandBack, Run, StepRetry, Suspended, current_run
from leasetask.steps import record_cancelled
from leasetask.threads import Threads


async def execute(run: Run, threads: Threads) -> Outcome:
    """Run a claimed task's handler until it returns, raises, waits, or may not go on."""
    kind = run.kind
    try:
        value = convert(run.claimed.input, kind.input_type, what=f"stored input of {kind.name}")
    except PayloadError as error:
        return Fail(describe(error, run.attempt), retryable=False)
    if kind.is_async:
        return await _execute_async(run, value)
    return await _execute_sync(run, value, threads)


# --- async handlers --------------------------------------------------------------------------


async def _execute_async(run: Run, value: Any) -> Outcome:
    root = asyncio.current_task()
    assert root is not None
    branches = run.branches = Branches(run, root)
    run.interrupt = root.cancel
    if run.interrupted:
        root.cancel()
    current_run.set(run)
    result, error = None, None
    try:
        context = AsyncContext(run)
        arguments = (context, value) if run.kind.takes_input else (context,)
        with _traced(run):
            handler = run.kind.handler(*arguments)
            result = await operations.within(run.kind.timeout, handler, run.label)
    except BaseException as raised:
        error = raised
    finally:
        current_run.set(None)
        run.interrupt = None
        while root.cancelling():
            root.uncancel()
    if _compensates(run, error):
        error = await _compensate_async(run)
    branches.close()
    if branches.verdict == "suspend":
        with suppress(LeaseLost):
            await operations.drive_async(run, record_cancelled(run))
    if others := branches.others():
        await _drop(others)
    run.branches = None  # else each run is a cycle, and collecting those costs a third of the CPU
    if isinstance(branches.verdict, ReplayError):
        error = branches.verdict
    elif branches.verdict == "suspend" and isinstance(error, asyncio.CancelledError):
        error = Suspended()
    return conclude(run, result, error)


async def _compensate_async(run: Run) -> BaseException | None:
    try:
        await operations.drive_async(run, compensation.run_compensations(run))
    except BaseException as error:
        return error
    return None


async def _drop(tasks: list[asyncio.Task[Any]]) -> None:
    """End what the handler left running; its `finally` blocks run before the outcome is sent."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=5)


# --- sync handlers ---------------------------------------------------------------------------


async def _execute_sync(run: Run, value: Any, threads: Threads) -> Outcome:
    over: asyncio.Future[Outcome] = run.loop.create_future()

    def settle(outcome: Outcome) -> None:
        if not over.done():
            over.set_result(outcome)

    def time_out() -> None:
        error = RunTimeout(f"{run.label} ran longer than its timeout; its thread goes on, unheard")
        settle(Fail(describe(error, run.attempt), retryable=True))

    def work() -> None:
        outcome = copy_context().run(_run_handler, run, value)
        with suppress(RuntimeError):  # the loop has closed: nobody waits for this thread any more
            run.loop.call_soon_threadsafe(settle, outcome)

    run.on_timeout = lambda: run.loop.call_soon_threadsafe(time_out)
    run.set_time_limit(run.kind.timeout)
    threads.submit(work)
    try:
        return await over
    finally:
        run.on_timeout = None  # it refers to the run: a cycle


def _run_handler(run: Run, value: Any) -> Outcome:
    current_run.set(run)
    result, error = None, None
    try:
        context = Context(run)
        with _traced(run):
            result = run.kind.handler(*((context, value) if run.kind.takes_input else (context,)))
    except BaseException as raised:
        error = raised
    if _compensates(run, error):
        error = None
        try:
            operations.drive(run, compensation.run_compensations(run))
        except BaseException as raised:
            error = raised
    return conclude(run, result, error)


def _traced(run: Run) -> AbstractContextManager[Any]:
    if not run.traced:
        return telemetry.UNTRACED
    attributes = {"leasetask.attempt": run.attempt, "leasetask.run": run.claimed.runs}
    return telemetry.processing(run.claimed.kind, run.claimed.id, run.claimed.trace, attributes)


# --- judging -----------------------------------------------------------------------------------


def _compensates(run: Run, error: BaseException | None) -> bool:
    """Whether the handler has unwound and its compensations are due.

    An ordinary error on the way to where it stood is tried again instead; and before anybody knows
    whether an effect happened, nothing is undone.
    """
    if run.claimed.compensating is None or run.lost is not None or run.unwound:
        return False
    if run.journal.undecided() is not None:
        return False
    return run.journal.complete or error is None or isinstance(error, TaskCanceled)


def conclude(run: Run, result: Any, error: BaseException | None) -> Outcome:
    """Say what becomes of a run that returned `result` or raised `error`."""
    if run.completed:
        return Completed()
    if run.lost is not None or isinstance(error, LeaseLost):
        return Lost(run.lost or str(error))
    if error is None:
        return _returned(run, result)
    leaves = list(_leaves(error))
    stands = all(isinstance(leaf, Suspended | asyncio.CancelledError) for leaf in leaves)
    if stands and any(isinstance(leaf, Suspended) for leaf in leaves):
        return _parked(run)
    if stands and run.handing_back:
        return Release()
    if run.cancel_requested and _is_cancellation(error):
        return Release()
    return _raised(run, error)


def _returned(run: Run, result: Any) -> Outcome:
    if run.unwound:
        error: Exception = SuspensionSwallowed(
            f"{run.label}: the handler caught the suspension and returned; let BaseException pass"
        )
        return Fail(describe(error, run.attempt), retryable=False, outright=True)
    if run.claimed.compensating is not None:
        undecided = run.journal.undecided()
        if undecided is not None:
            reason = unknown(run, undecided, "the handler went on without it")
            return Fail(
                {**describe(reason, run.attempt), "step": undecided}, retryable=False, outright=True
            )
        return Finish("null")
    if not run.journal.complete:
        error = run.journal.accusation(None)
        return Fail(describe(error, run.attempt), retryable=False, outright=True)
    try:
        return Finish(
            encode(
                result,
                run.kind.result_type,
                what=f"result of {run.kind.name}",
                limit=run.payload_limit,
            )
        )
    except PayloadError as refused:
        return Fail(describe(refused, run.attempt), retryable=True)


def _parked(run: Run) -> Outcome:
    waits = [p for p in run.parked if isinstance(p, Wait)]
    retries = [p for p in run.parked if isinstance(p, StepRetry)]
    if any(isinstance(p, HandBack) for p in run.parked):
        return Release(notes={r.name: r.note for r in retries})
    if not retries:
        return Suspend(waits[0])
    notes = {r.name: r.note for r in retries}
    for wait in waits:
        if wait.until is not None:
            notes[wait.name] = {"until": run.server_time(wait.until)}
    return Release(min(r.delay for r in retries), notes, retries[0].note["error"])


def _raised(run: Run, error: BaseException) -> Outcome:
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, ReplayError):
            return Fail(describe(leaf, run.attempt), retryable=False, outright=True)
    for leaf in leaves:
        if isinstance(leaf, EffectUnknown):
            # Not even compensations may run before a person has said what happened.
            details = {**describe(leaf, run.attempt), "step": leaf.step}
            return Fail(details, retryable=False, outright=True)
    for leaf in leaves:
        if isinstance(leaf, StepFailed | SignalTimeout):
            # `n` tells the operator's retry from which record on to begin again.
            details = {"step": leaf.step, "n": leaf.number}
            return Fail({**describe(leaf, run.attempt), **details}, retryable=False)
    final = any(isinstance(leaf, NonRetryable | ConfigurationError) for leaf in leaves)
    told = describe(error, run.attempt)
    for cause in (cause for leaf in leaves for cause in _causes(leaf)):
        if isinstance(cause, StepFailed | SignalTimeout):
            # What the handler made of a step's failure: the operator's retry begins there too.
            told = {**told, "step": cause.step, "n": cause.number}
            break
    return Fail(told, retryable=not final)


def _is_cancellation(error: BaseException) -> bool:
    return all(isinstance(leaf, asyncio.CancelledError | TaskCanceled) for leaf in _leaves(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Give the errors that an error was raised from, the nearest first."""
    for _ in range(20):
        if error.__cause__ is None:
            return
        error = error.__cause__
        yield error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Give the errors inside exception groups, as a TaskGroup raises them."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
