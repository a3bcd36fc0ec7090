"""A task's history as a file, and whether a handler still replays it; no server needed.

What is in flight in production can be exported, kept beside the tests, and replayed against the
code that is about to be deployed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from leasetask import registry
from leasetask.branches import task_factory
from leasetask.errors import NonDeterminismError, ReplayError
from leasetask.execution import execute
from leasetask.journal import Journal, Record
from leasetask.model import Ack, Checkpoint, Claimed, Fail, Note, Retry
from leasetask.payload import DEFAULT_LIMIT
from leasetask.registry import Kind, Registry
from leasetask.run import Run, Suspended
from leasetask.threads import Threads

_PATIENCE = 10.0
"""Seconds that a replay may take: it runs no body, so it is quick or stuck."""


@dataclass(frozen=True, slots=True)
class History:
    """What a replay needs to know of a task."""

    id: str
    kind: str
    version: int
    key: str
    status: str
    input: Any
    records: dict[str, Record]
    open_steps: dict[str, Record]
    compensating: str | None = None


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
    if isinstance(outcome, Fail) and outcome.outright:
        raise _error_of(outcome, history)
    if isinstance(outcome, Fail) and outcome.error["type"] in (
        "PayloadError",
        "ConfigurationError",
    ):
        raise _error_of(outcome, history)


def replay(handler: Callable[..., Any], history: History | dict[str, Any]) -> None:
    """Check, in a test, that a handler still replays an exported history.

    Args:
        handler: the function, decorated or not.
        history: what `leasetask export` wrote, as `json.load` gives it.

    Raises:
        ReplayError: it does not.
    """
    known = history if isinstance(history, History) else History(**history)
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
    run = Run(
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
        journal=Journal(dict(history.records), dict(history.open_steps)),
        port=_Nowhere(),
        transactions=_NoTransactions(),
        registry=Registry(),
        loop=loop,
        payload_limit=DEFAULT_LIMIT,
        lease=_PATIENCE,
        lease_ends=float("inf"),
        # As at a shutdown: whatever is not recorded must not start.
        handing_back=True,
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            return await execute(run, threads)
    raise NonDeterminismError(
        f"the replay of task {history.id} does not end; it waits outside of steps"
    )


def _error_of(outcome: Fail, history: History) -> ReplayError:
    return ReplayError(
        f"task {history.id} ({history.kind}, {history.status}) would break: "
        f"{outcome.error['type']}: {outcome.error['message']}"
    )


class _Nowhere:
    async def send(self, run: Run, request: Checkpoint | Note) -> Ack:
        raise Suspended

    async def snapshot(self) -> str:
        raise Suspended


class _NoTransactions:
    keeper = None

    def open(self, isolation: Any) -> Any:
        raise Suspended

    def open_async(self, isolation: Any) -> Any:
        raise Suspended
