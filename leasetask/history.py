"""A task's history as a file, and whether a handler still replays it; no server needed.

What is in flight in production can be exported, kept beside the tests, and replayed against the
code that is about to be deployed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from leasetask import registry
from leasetask.branches import task_factory
from leasetask.errors import NonDeterminismError, ReplayError
from leasetask.execution import execute
from leasetask.journal import Journal, Record
from leasetask.model import FINISHED, Ack, Checkpoint, Claimed, Fail, Note, Retry
from leasetask.payload import DEFAULT_LIMIT
from leasetask.registry import Kind, Registry
from leasetask.run import HandBack, Run, Suspended
from leasetask.threads import Threads

_PATIENCE = 10.0
"""Seconds that a replay may take: it runs no body, so it is quick or stuck."""


@dataclass(frozen=True, slots=True)
class History:
    """What a replay needs to know of a task.

    Attributes:
        waits_at: the sleep or wait for a signal that it stands at: the next to be recorded.
    """

    id: str
    kind: str
    version: int
    key: str
    status: str
    input: Any
    records: dict[str, Record]
    open_steps: dict[str, Record]
    compensating: str | None = None
    waits_at: str | None = None


def check(kind: Kind, history: History) -> None:
    """Replay a history up to where it stands; no body and no commit is run.

    Raises:
        ReplayError: the handler does not ask for what was recorded, or not in a way that works.
        PayloadError: the stored input or a recorded result does not fit its type any more.
    """
    threads = Threads()
    try:
        outcome = asyncio.run(_replay(kind, history, threads))
    finally:
        threads.close()
    if isinstance(outcome, Fail) and _breaks(outcome, history):
        raise ReplayError(
            f"task {history.id} ({history.kind}, {history.status}) would break: "
            f"{outcome.error['type']}: {outcome.error['message']}"
        )


def _breaks(outcome: Fail, history: History) -> bool:
    """Whether a replay's end is the change's doing.

    One that a record or the handler's own decision leads to is not; nor what a task that has failed
    had raised before.
    """
    if outcome.outright or outcome.error["type"] in ("PayloadError", "ConfigurationError"):
        return True
    return outcome.retryable and history.status not in FINISHED


def replay(handler: Callable[..., Any], history: History | dict[str, Any]) -> None:
    """Check, in a test, that a handler still replays an exported history.

    Args:
        handler: the function, decorated or not.
        history: what `leasetask export` wrote, as `json.load` gives it.

    Raises:
        ReplayError: it does not.
        ValueError: that is no history.
    """
    try:
        known = history if isinstance(history, History) else History(**history)
    except TypeError as error:
        raise ValueError(f"not what `leasetask export` writes: {error}") from None
    kind = registry.declare(
        handler,
        name=known.kind,
        version=known.version,
        accepts=(),
        retry=Retry(),
        priority=0,
        lease=None,
        timeout=None,
        deadline=None,
        strict=True,
    )
    check(kind, known)


async def _replay(kind: Kind, history: History, threads: Threads) -> Any:
    loop = asyncio.get_running_loop()
    loop.set_task_factory(task_factory)
    now = datetime.now(UTC)
    edge = _Edge()
    run = edge.run = Run(
        claimed=Claimed(
            id=history.id,
            kind=history.kind,
            version=history.version,
            key=history.key,
            input=history.input,
            state=history.records,
            open_steps=history.open_steps,
            stored_steps=0,
            attempts=1,
            max_attempts=1,
            runs=1,
            token="",
            priority=0,
            due_at=now,
            created_at=now,
            deadline=None,
            claimed_at=now,
            cancel_requested=False,
            compensating=history.compensating,
            last_error=None,
        ),
        kind=kind,
        journal=_Journal(history),
        port=edge,
        observer=edge,
        transactions=edge,
        registry=Registry(),
        loop=loop,
        payload_limit=DEFAULT_LIMIT,
        lease=_PATIENCE,
        lease_ends=float("inf"),
    )
    running = loop.create_task(execute(run, threads))
    done, _ = await asyncio.wait([running], timeout=_PATIENCE)
    if done:
        return running.result()
    raise NonDeterminismError(
        f"the replay of task {history.id} does not end; it waits outside of steps"
    )


class _Journal(Journal):
    """The records, and the wait that the task stands at: it has to be asked for like them."""

    def __init__(self, history: History) -> None:
        records = dict(history.records)
        if history.waits_at is not None:
            last = max((int(record["n"]) for record in records.values()), default=0)
            records[history.waits_at] = {"n": last + 1}
        super().__init__(records, dict(history.open_steps))
        self._waits_at = history.waits_at

    def ask(self, name: str) -> Record | None:
        """As in a run; what the wait will bring is not recorded yet."""
        record = super().ask(name)
        return None if name == self._waits_at else record


class _Edge:
    """Where the records end: no body starts, nothing is committed, the replay is over."""

    run: Run

    def __init__(self) -> None:
        self.keeper = self

    def forget(self, opened: Any) -> None:
        """None has ended."""

    def block(self, what: str, name: str) -> None:
        """A sync handler would run a body; at a wait it unwinds by itself."""
        if what != "at the wait":
            self._leave()

    async def wait(self, what: str, name: str) -> None:
        """A coroutine would run one."""
        if what != "at the wait":
            await self._stand()

    async def send(self, run: Run, request: Checkpoint | Note) -> Ack:
        """It would commit an effect's start, or register a compensation."""
        return await self._stand()

    async def snapshot(self) -> str:
        """It would look into the business database."""
        return await self._stand()

    def open(self, isolation: Any) -> NoReturn:
        """It would begin a business transaction."""
        self._leave()

    @asynccontextmanager
    async def open_async(self, isolation: Any) -> AsyncIterator[Any]:
        """It would begin one."""
        yield await self._stand()

    def _leave(self) -> NoReturn:
        self.run.park(HandBack())
        raise Suspended

    async def _stand(self) -> NoReturn:
        """Async handlers never unwind: the other branches may still ask for what is recorded."""
        if not self.run.kind.is_async:
            self._leave()
        assert self.run.branches is not None
        self.run.parked.append(HandBack())
        self.run.interrupted = True  # no body has begun, so none was cancelled
        await self.run.branches.stand()
        raise AssertionError("a stand never returns")
