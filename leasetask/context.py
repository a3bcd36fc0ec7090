"""What a handler is given: its verbs, in both colours."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

from leasetask import verbs
from leasetask.model import Retry
from leasetask.run import Run, logger_for
from leasetask.verbs import StepOptions

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
        return verbs.drive(self._run, verbs.step(self._run, name, function, args, kwargs, options))

    def sleep(self, seconds: float, *, name: str | None = None) -> None:
        """Free the worker and go on after `seconds`; a year is fine. Spends no attempt."""
        verbs.drive(self._run, verbs.sleep(self._run, seconds, name))

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
        return verbs.drive(self._run, verbs.wait_signal(self._run, topic, timeout, name, type))

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
        return verbs.drive(self._run, verbs.wait_for(self._run, name, check, topic, every, options))

    def compensate(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Register `function(*args)` to be run if the task is canceled or fails for good."""
        verbs.drive(self._run, verbs.compensate(self._run, name, function, args))


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
        return await verbs.drive_async(
            self._run, verbs.step(self._run, name, function, args, kwargs, options)
        )

    async def sleep(self, seconds: float, *, name: str | None = None) -> None:
        """As `Context.sleep`."""
        await verbs.drive_async(self._run, verbs.sleep(self._run, seconds, name))

    async def wait_signal(
        self,
        topic: str,
        *,
        timeout: float | None = None,
        name: str | None = None,
        type: Any = Any,
    ) -> Any:
        """As `Context.wait_signal`."""
        return await verbs.drive_async(
            self._run, verbs.wait_signal(self._run, topic, timeout, name, type)
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
        return await verbs.drive_async(
            self._run, verbs.wait_for(self._run, name, check, topic, every, options)
        )

    async def compensate(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """As `Context.compensate`."""
        await verbs.drive_async(self._run, verbs.compensate(self._run, name, function, args))
