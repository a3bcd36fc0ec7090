"""What a verb waits for, and the two drivers that wait: blocking a thread, or awaiting.

A verb is a generator: it decides, and yields an `Operation` for whatever takes time. A driver runs
it, `drive` in a sync handler's thread, `drive_async` in an async handler's task, and decides nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from leasetask import telemetry
from leasetask.errors import LeaseLost, NonDeterminismError, RunTimeout
from leasetask.model import Ack, Checkpoint, Note
from leasetask.run import Parked, Run, Suspended

T = TypeVar("T")
in_body: ContextVar[bool] = ContextVar("leasetaskin_body", default=False)


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


def tell(run: Run, what: str, name: str) -> None:
    """Tell the test harness, where there is one, what a sync handler has come to."""
    if run.observer is not None:
        run.observer.block(what, name)


async def tell_async(run: Run, what: str, name: str) -> None:
    """As `tell`, for a coroutine."""
    if run.observer is not None:
        await run.observer.wait(what, name)


# --- operations ----------------------------------------------------------------------------


@dataclass(slots=True)
class Gate:
    """Holds the body of an unrecorded step until all that is recorded was asked for."""

    name: str

    def block(self, run: Run) -> None:
        """A sync handler has one branch: what it has not asked for by now, it will not."""
        raise run.journal.accusation(self.name)

    async def wait(self, run: Run) -> None:
        """Other branches may still ask."""
        assert run.branches is not None
        await run.branches.gate(self.name)


@dataclass(slots=True)
class Body:
    """The user's function of a step."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    name: str = ""

    def block(self, run: Run) -> Any:
        """A thread cannot be stopped: the executor looks at `times_out_at` from outside."""
        token = in_body.set(True)
        run.doing[self.name] = time.monotonic()
        outer = run.times_out_at
        if self.timeout is not None:
            run.times_out_at = min(outer or float("inf"), time.monotonic() + self.timeout)
        try:
            tell(run, "before the body of", self.name)
            with telemetry.step(self.name):
                value = self.function(*self.args, **self.kwargs)
            tell(run, "after the body of", self.name)
            return value
        finally:
            run.times_out_at = outer
            run.doing.pop(self.name, None)
            in_body.reset(token)

    async def wait(self, run: Run) -> Any:
        """A `def` body runs in the event loop, as any function that a coroutine calls."""
        token = in_body.set(True)
        run.doing[self.name] = time.monotonic()
        try:
            await tell_async(run, "before the body of", self.name)
            with telemetry.step(self.name):
                value = self.function(*self.args, **self.kwargs)
                if inspect.isawaitable(value):
                    value = await within(self.timeout, value, "a step")
            await tell_async(run, "after the body of", self.name)
            return value
        finally:
            run.doing.pop(self.name, None)
            in_body.reset(token)


@dataclass(slots=True)
class Send:
    """A checkpoint or note, committed with others that are ready."""

    request: Checkpoint | Note

    def block(self, run: Run) -> Ack:
        """Hand it to the event loop and wait for the answer."""
        return from_thread(run, run.port.send(run, self.request))

    async def wait(self, run: Run) -> Ack:
        """Await the answer; a cancellation here undoes nothing that is on its way to the server."""
        return await run.port.send(run, self.request)


@dataclass(slots=True)
class Snapshot:
    """The server's snapshot, taken before a `wait_for`'s check."""

    def block(self, run: Run) -> str:
        """Ask from the handler's thread."""
        return from_thread(run, run.port.snapshot())

    async def wait(self, run: Run) -> str:
        """Ask from the event loop."""
        return await run.port.snapshot()


@dataclass(slots=True)
class Stand:
    """The branch waits for what only a later run can see."""

    parked: Parked

    @property
    def parked_name(self) -> str:
        """The step that the branch stands at."""
        return getattr(self.parked, "name", "")

    def block(self, run: Run) -> None:
        """Unwind the handler."""
        tell(run, "at the wait", self.parked_name)
        run.park(self.parked)
        raise Suspended

    async def wait(self, run: Run) -> None:
        """Park; the executor drops the handler when every branch stands."""
        assert run.branches is not None
        await tell_async(run, "at the wait", self.parked_name)
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


def from_thread(run: Run, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the worker's event loop and wait for it in the handler's thread.

    Raises:
        LeaseLost: the worker has ended meanwhile, and left this thread to itself.
    """
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, run.loop)
    except RuntimeError as error:
        coroutine.close()
        raise LeaseLost(f"{run.label}: its worker has stopped") from error
    return future.result()
