"""One run of one task in this process: its lease, its journal, and what it was told meanwhile.

Flags are set from the heartbeat's thread and read by verbs in the handler's; each is one attribute
that only ever goes one way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from leasetask.errors import (
    DuplicateStep,
    LeaseLost,
    PayloadError,
    SuspensionSwallowed,
    TaskCanceled,
)
from leasetask.journal import Journal
from leasetask.model import Ack, Checkpoint, Claimed, Note, Wait
from leasetask.payload import printable
from leasetask.registry import Kind, Registry

current_run: ContextVar[Run | None] = ContextVar("leasetask_run", default=None)


class Branches(Protocol):
    """The asyncio tasks of an async handler, as verbs see them."""

    async def gate(self, name: str) -> None:
        """Return once all that is recorded has been asked for."""

    async def stand(self) -> None:
        """Park this branch; never returns."""


class Port(Protocol):
    """What a run needs of the outside; the worker's committer, or a test's."""

    async def send(self, run: Run, request: Checkpoint | Note) -> Ack:
        """Commit a checkpoint or a note, with others that are ready; raises LeaseLost."""

    async def snapshot(self) -> str:
        """Return the server's current snapshot, as text."""


class Observer(Protocol):
    """Told of the points at which a process may die; None outside the test harness."""

    def block(self, what: str, name: str) -> None:
        """A sync handler's thread has come to a point."""

    async def wait(self, what: str, name: str) -> None:
        """A coroutine has come to a point."""


class TransactionSource(Protocol):
    """Opens the transactions of `ctx.transaction`, and watches over them."""

    keeper: Any

    def open(self, isolation: Any) -> AbstractContextManager[Any]:
        """Open one for a sync handler."""

    def open_async(self, isolation: Any) -> AbstractAsyncContextManager[Any]:
        """Open one for an async handler."""


class Suspended(BaseException):
    """Unwinds a sync handler that waits; `except Exception` does not catch it."""


@dataclass(slots=True)
class StepRetry:
    """A step that failed and will be tried again, the worker being free meanwhile."""

    name: str
    delay: float
    note: dict[str, Any]


@dataclass(slots=True)
class HandBack:
    """The worker stops: the task is given back as it is."""


Parked = Wait | StepRetry | HandBack


@dataclass(slots=True)
class Compensation:
    """A registered compensation: what to call if the task is canceled or fails for good."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Run:
    """The state that a run's verbs, its executor and its worker share."""

    claimed: Claimed
    kind: Kind
    journal: Journal
    port: Port
    transactions: TransactionSource
    registry: Registry
    loop: asyncio.AbstractEventLoop
    payload_limit: int
    lease: float
    lease_ends: float
    started: float = field(default_factory=time.monotonic)
    lost: str | None = None
    cancel_requested: bool = False
    refused_by_cancel: bool = False
    handing_back: bool = False
    ending: bool = False
    completed: bool = False
    holds_row: bool = False
    observer: Observer | None = None
    times_out_at: float | None = None
    on_timeout: Callable[[], object] | None = None
    parked: list[Parked] = field(default_factory=list)
    unwound: bool = False
    compensations: list[Compensation] = field(default_factory=list)
    cancelled_steps: dict[str, str] = field(default_factory=dict)
    """Records of cancelled steps, kept back until the handler is seen to go on after them."""
    attempt: int = 1
    traced: bool = False
    branches: Branches | None = None
    interrupt: Callable[[], object] | None = None
    interrupted: bool = False
    doing: dict[str, float] = field(default_factory=dict)
    """Bodies under way, with the local monotonic time at which each began."""
    _progress: dict[str, Any] = field(default_factory=dict)
    _told: str = "{}"

    # --- told by heartbeat, committer and worker -------------------------------------------

    def lose(self, reason: str) -> None:
        """The lease is gone: verbs refuse from now on, async bodies are cancelled."""
        if self.lost is None:
            self.lost = reason
            self._call_interrupt()

    def request_cancel(self) -> None:
        """A cancel was asked for: no further ordinary step starts."""
        if not self.cancel_requested and not self.claimed.compensating:
            self.cancel_requested = True
            self._call_interrupt()

    def hand_back(self) -> None:
        """The worker's grace is over: unwind at the next verb."""
        if not self.handing_back:
            self.handing_back = True
            self._call_interrupt()

    def renew(self, sent_at: float) -> None:
        """A heartbeat or checkpoint sent at that local time has been acknowledged."""
        self.lease_ends = max(self.lease_ends, sent_at + self.lease)

    def _call_interrupt(self) -> None:
        self.interrupted = True
        with suppress(RuntimeError):  # the loop has closed, and its handlers with it
            self.loop.call_soon_threadsafe(self._interrupt_handler)

    def _interrupt_handler(self) -> None:
        # Asked only now: the handler may have ended since, and its outcome be on the way.
        if self.interrupt is not None:
            self.interrupt()

    def set_time_limit(self, seconds: float | None) -> None:
        """The handler may run so long; a step's own limit narrows it meanwhile."""
        self.times_out_at = None if seconds is None else time.monotonic() + seconds

    def news(self) -> str | None:
        """Return, as JSON, how far it is and what it does, if the server has not been told that."""
        news = dict(self._progress)
        for name, began in list(self.doing.items())[:1]:
            news |= {"step": name, "since": round(self.server_time(began), 3)}
        text = msgspec.json.encode(news).decode()
        return None if text == self._told else text

    def was_told(self, news: str | None) -> None:
        """A heartbeat has carried these news, if there were any."""
        self._told = news or self._told

    def report_progress(self, fraction: float | None, message: str | None) -> None:
        """Keep the newest progress for the next heartbeat.

        Raises:
            PayloadError: the fraction is no number, or the message no text.
        """
        try:
            share = None if fraction is None else float(fraction)
            words = None if message is None else printable(message, 1000)
        except (TypeError, ValueError, AttributeError) as error:
            what = f"progress({fraction!r:.60}, {message!r:.60})"
            raise PayloadError(f"{what}: a number from 0 to 1, and a few words") from error
        self._progress = {"fraction": share, "message": words}

    # --- asked by verbs ------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether no ordinary step may start: canceled, or on the way to compensations."""
        return self.cancel_requested or self.claimed.compensating is not None

    def check_usable(self) -> None:
        """Raise if this run may not use verbs any more."""
        if self.is_lost():
            raise LeaseLost(f"task {self.claimed.id}: {self.lost}; nothing of this run is recorded")
        if self.unwound and self.kind.is_async:
            raise Suspended  # another branch was the first to hand the run back
        if self.unwound:
            raise SuspensionSwallowed(
                f"task {self.claimed.id}: the handler caught the suspension and went on; "
                "let BaseException pass, and use no verbs in finally blocks"
            )

    def is_lost(self) -> bool:
        """Whether the lease is gone, looking at the clock: after a freeze the watchdog may be late."""
        if self.lost is None and time.monotonic() > self.lease_ends:
            self.lose("its lease was not renewed in time")
        return self.lost is not None

    def register(self, compensation: Compensation) -> None:
        """Remember what undoes something; raises DuplicateStep."""
        if any(known.name == compensation.name for known in self.compensations):
            raise DuplicateStep(
                f"task {self.claimed.id}: two compensations are named {compensation.name!r}; "
                "names are unique within a task, those of steps with compensate= included"
            )
        self.compensations.append(compensation)

    def check_startable(self) -> None:
        """Raise if nothing new may start: the lease is lost, a cancel asked for, a drain."""
        self.check_usable()
        if self.stopping and self.journal.complete:
            why = "a cancel was asked for" if self.cancel_requested else "it compensates"
            self.refused_by_cancel = True
            raise TaskCanceled(f"task {self.claimed.id}: {why}; no further step starts")
        if self.handing_back:
            self.park(HandBack())
            raise Suspended

    def check_going_on(self) -> None:
        """Raise, between the chunks of a step, if there is no use in going on."""
        if self.is_lost():
            self.check_usable()
        if self.cancel_requested and self.journal.complete:
            self.refused_by_cancel = True
            raise TaskCanceled(f"task {self.claimed.id}: a cancel was asked for")

    def park(self, parked: Parked) -> None:
        """Remember what this run stands at; a sync handler unwinds next."""
        self.parked.append(parked)
        self.unwound = not self.kind.is_async or isinstance(parked, HandBack)

    def wait_until(self, name: str, seconds: float | None) -> float | None:
        """Return the local monotonic time at which a wait ends: an earlier run's, if it noted one."""
        noted = self.journal.open_step(name).get("until")
        if noted is not None:
            return self.started + (float(noted) - self.claimed.claimed_at.timestamp())
        return None if seconds is None else time.monotonic() + max(0.0, seconds)

    def server_time(self, local: float) -> float:
        """Return the server's clock, in seconds since the epoch, at a local monotonic time."""
        return self.claimed.claimed_at.timestamp() + (local - self.started)

    @property
    def label(self) -> str:
        """Name the task in log lines."""
        return f"{self.claimed.kind} {self.claimed.id}"


def logger_for(run: Run) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger whose lines carry the task's id, kind and attempt."""
    logger = logging.getLogger(f"leasetask.task.{run.claimed.kind}")
    return logging.LoggerAdapter(logger, log_fields(run))


def log_fields(run: Run) -> dict[str, Any]:
    """Return what a log record of a run carries beside its message."""
    return {
        "task_id": run.claimed.id,
        "kind": run.claimed.kind,
        "version": run.claimed.version,
        "attempt": run.attempt,
        "run": run.claimed.runs,
    }
