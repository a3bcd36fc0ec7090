"""What a handler is given: its verbs, in both colours."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar, overload

from leasetask import business, compensation, effects, steps, waits
from leasetask.business import EnqueueOptions
from leasetask.effects import Attempt
from leasetask.model import Retry
from leasetask.operations import Verb, drive, drive_async
from leasetask.run import Run, logger_for
from leasetask.steps import StepOptions
from leasetask.transactions import Isolation

T = TypeVar("T")


class _Base:
    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def task_id(self) -> str:
        """The task's id, a uuid as text."""
        return self._run.claimed.id

    @property
    def key(self) -> str:
        """The task's idempotency key."""
        return self._run.claimed.key

    @property
    def attempt(self) -> int:
        """Which try this is since the last progress, from 1."""
        return self._run.attempt

    @property
    def run(self) -> int:
        """Which run this is since enqueue, from 1."""
        return self._run.claimed.runs

    @property
    def cancel_requested(self) -> bool:
        """Whether a cancel was asked for; long steps look now and then, or call `check`."""
        return self._run.cancel_requested

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose lines carry the task's id, kind and attempt."""
        return logger_for(self._run)

    def check(self) -> None:
        """Call it between the chunks of long work, also inside steps.

        Raises:
            LeaseLost: the lease is gone; stop, nothing is recorded any more.
            TaskCanceled: a cancel was asked for; clean up and let it pass.
        """
        self._run.check_going_on()

    def progress(self, fraction: float | None = None, message: str | None = None) -> None:
        """Show how far the task is; travels with the next heartbeat, and costs no statement.

        Args:
            fraction: 0 to 1.
            message: a few words; cut to 1,000 characters.
        """
        self._run.report_progress(fraction, message)


class Context(_Base):
    """The verbs of a `def` handler.

    A verb may suspend the handler: it is unwound, `finally` blocks run (they may not use verbs),
    and a later run replays the recorded steps up to where it stood.
    """

    def step(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        retry: Retry | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        timeout: float | None = None,
        inserted: bool = False,
        compensate: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> T:
        """Run `function(*args, **kwargs)` once and record its result; replays return the record.

        Args:
            name: unique within the task.
            retry: tries of this step; the kind's own policy by default.
            retry_on: only these exceptions are tried again; all by default.
            timeout: seconds for one run. A thread cannot be stopped: past it the try is charged
                and given to another run while this one may still be inside.
            inserted: the step was put in between those that tasks in flight have recorded.
            compensate: called with the result if the task is canceled or fails for good;
                registered in the same commit as the result.

        Raises:
            StepFailed: the budget is spent, or NonRetryable was raised; recorded, so every
                replay takes the same way.
            TaskCanceled, LeaseLost: the step was not started.
            DuplicateStep, NonDeterminismError: the handler is at fault; the task fails.
        """
        options = StepOptions(retry, retry_on, timeout, inserted, compensate)
        return drive(self._run, steps.step(self._run, name, function, args, kwargs, options))

    def sleep(self, seconds: float, *, name: str | None = None) -> None:
        """Free the worker and go on after `seconds`; a year is fine. Spends no attempt."""
        drive(self._run, waits.sleep(self._run, seconds, name))

    def wait_signal(
        self,
        topic: str,
        *,
        timeout: float | None = None,
        name: str | None = None,
        type: Any = Any,
    ) -> Any:
        """Wait for a signal and consume it; one that came early counts.

        Args:
            topic: whose signals.
            timeout: seconds from when the wait began; None: as long as the task lives.
            name: the wait's step name; numbered in order by default.
            type: what the payload is converted to.

        Raises:
            SignalTimeout: recorded, so that every replay takes the same way.
        """
        return drive(self._run, waits.wait_signal(self._run, topic, timeout, name, type))

    def wait_for(
        self,
        name: str,
        check: Callable[[], T],
        *,
        topic: str,
        every: float,
        retry: Retry | None = None,
    ) -> T:
        """Look in your own database until `check()` gives something, and record that.

        Args:
            name: unique within the task.
            check: returns what is true of the outside, or None or False for not yet.
            topic: a signal on it makes the task look again at once; none is consumed.
            every: seconds between looks without a signal.
            retry: tries of a check that raises.
        """
        options = StepOptions(retry=retry)
        return drive(self._run, waits.wait_for(self._run, name, check, topic, every, options))

    def transaction(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        isolation: Isolation = "read committed",
        retry: Retry | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        inserted: bool = False,
        compensate: Callable[..., Any] | None = None,
    ) -> T:
        """Run `function(db, *args)` in a transaction that commits together with the step's record.

        Its writes are there if and only if the record is. It may be called again if the commit was
        refused for the moment: it must do nothing outside the transaction. The server ends the
        transaction if the worker freezes for a whole lease inside it.

        Args:
            function: gets a psycopg connection (or what `App(transactions=…)` yields) inside the
                transaction; it neither commits nor rolls back.
            isolation: above READ COMMITTED the task's row is locked from the start. With
                `App(transactions=…)` your factory sets the level, and this tells what it is.
            retry, retry_on, inserted, compensate: as in `step`.

        Raises:
            LeaseLost: the transaction was rolled back. StepFailed: as in `step`.
        """
        options = StepOptions(retry, retry_on, None, inserted, compensate)
        return drive(
            self._run, business.transaction(self._run, name, function, args, isolation, options)
        )

    def complete(
        self, function: Callable[..., T], *args: Any, isolation: Isolation = "read committed"
    ) -> T:
        """`return ctx.complete(function, …)`: the last business write and the task's end, in one commit.

        As `transaction`, but for the record: what the function returns is the task's result.
        """
        return drive(self._run, business.complete(self._run, function, args, isolation))

    def effect(
        self,
        name: str,
        do: Callable[[Attempt], T],
        reconcile: Callable[[Attempt], Any],
        *,
        retry: Retry | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        timeout: float | None = None,
        inserted: bool = False,
        compensate: Callable[..., Any] | None = None,
    ) -> T:
        """Do something outside that must not happen twice.

        The start is committed before `do(attempt)`. If a later run, or a later try, finds a start
        without a result, `reconcile(attempt)` is asked first.

        Args:
            do: gets an `Attempt`, whose `key` is the same for all attempts.
            reconcile: looks outside, and returns `Done(result)`, `NotDone()` or `Unknown(reason)`;
                one that raises is tried again like a step, and counts as `Unknown` in the end.
            retry, retry_on, timeout, inserted, compensate: as in `step`.

        Raises:
            EffectUnknown: let it pass: the task is a dead letter until `leasetask resolve`.
            StepFailed: as in `step`.
        """
        options = StepOptions(retry, retry_on, timeout, inserted, compensate)
        return drive(self._run, effects.effect(self._run, name, do, reconcile, options))

    def enqueue(
        self,
        name: str,
        task: Callable[..., Any] | str,
        input: Any = None,
        *,
        key: str | None = None,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
    ) -> str:
        """Enqueue another task, once, and return its id: enqueued and recorded in one commit.

        Args:
            name: the step's name.
            key: `task id/name` by default. The others are as in `App.enqueue`.
        """
        options = EnqueueOptions(at, delay, priority)
        return drive(self._run, business.enqueue(self._run, name, task, input, key, options))

    def compensate(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Register `function(*args)` to be run if the task is canceled or fails for good."""
        drive(self._run, compensation.compensate(self._run, name, function, args))


class AsyncContext(_Base):
    """The verbs of an `async def` handler; each as in `Context`, awaited.

    A wait parks its branch, and the handler is dropped once every branch stands.
    """

    @overload
    async def step(
        self, name: str, function: Callable[..., Awaitable[T]], *args: Any, **options: Any
    ) -> T: ...
    @overload
    async def step(
        self, name: str, function: Callable[..., T], *args: Any, **options: Any
    ) -> T: ...
    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        retry: Retry | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        timeout: float | None = None,
        inserted: bool = False,
        compensate: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Context.step`; the function may be `def` or `async def`.

        A `def` function runs in the event loop: what blocks belongs into `asyncio.to_thread`.
        """
        options = StepOptions(retry, retry_on, timeout, inserted, compensate)
        return await drive_async(
            self._run, steps.step(self._run, name, function, args, kwargs, options)
        )

    async def sleep(self, seconds: float, *, name: str | None = None) -> None:
        """As `Context.sleep`."""
        await drive_async(self._run, waits.sleep(self._run, seconds, name))

    async def wait_signal(
        self,
        topic: str,
        *,
        timeout: float | None = None,
        name: str | None = None,
        type: Any = Any,
    ) -> Any:
        """As `Context.wait_signal`."""
        return await drive_async(
            self._run, waits.wait_signal(self._run, topic, timeout, name, type)
        )

    async def wait_for(
        self,
        name: str,
        check: Callable[[], Any],
        *,
        topic: str,
        every: float,
        retry: Retry | None = None,
    ) -> Any:
        """As `Context.wait_for`; `check` may be `def` or `async def`."""
        options = StepOptions(retry=retry)
        return await drive_async(
            self._run, waits.wait_for(self._run, name, check, topic, every, options)
        )

    async def transaction(
        self,
        name: str,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        isolation: Isolation = "read committed",
        retry: Retry | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        inserted: bool = False,
        compensate: Callable[..., Any] | None = None,
    ) -> T:
        """As `Context.transaction`, on an async connection; `function` is `async def`."""
        options = StepOptions(retry, retry_on, None, inserted, compensate)
        verb: Verb[Any] = business.transaction(self._run, name, function, args, isolation, options)
        return await drive_async(self._run, verb)

    async def complete(
        self,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        isolation: Isolation = "read committed",
    ) -> T:
        """As `Context.complete`; `function` is `async def`."""
        verb: Verb[Any] = business.complete(self._run, function, args, isolation)
        return await drive_async(self._run, verb)

    async def effect(
        self,
        name: str,
        do: Callable[[Attempt], Any],
        reconcile: Callable[[Attempt], Any],
        *,
        retry: Retry | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        timeout: float | None = None,
        inserted: bool = False,
        compensate: Callable[..., Any] | None = None,
    ) -> Any:
        """As `Context.effect`; `do` and `reconcile` may be `def` or `async def`."""
        options = StepOptions(retry, retry_on, timeout, inserted, compensate)
        return await drive_async(self._run, effects.effect(self._run, name, do, reconcile, options))

    async def enqueue(
        self,
        name: str,
        task: Callable[..., Any] | str,
        input: Any = None,
        *,
        key: str | None = None,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
    ) -> str:
        """As `Context.enqueue`."""
        options = EnqueueOptions(at, delay, priority)
        return await drive_async(
            self._run, business.enqueue(self._run, name, task, input, key, options)
        )

    async def compensate(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """As `Context.compensate`."""
        await drive_async(self._run, compensation.compensate(self._run, name, function, args))
