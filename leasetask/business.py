"""`transaction`, `complete`, `enqueue`: the business write and its record in one commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from leasetask import client, hosts, protocol, transactions
from leasetask.errors import LeaseLost, ReplayError, TaskCanceled
from leasetask.model import Ack, Checkpoint, Enqueued, Finish
from leasetask.operations import Verb, in_body
from leasetask.payload import annotation_of, convert, decode, encode
from leasetask.protocol import Item, Query
from leasetask.run import Compensation, Run
from leasetask.steps import (
    StepOptions,
    cancelled,
    check_name,
    failed,
    record_text,
    replay,
    start,
)
from leasetask.transactions import Fenced, Isolation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnqueueOptions:
    """When and how soon an enqueued task is due."""

    at: datetime | None = None
    delay: float | None = None
    priority: int | None = None


@dataclass(slots=True)
class InTransaction:
    """A fenced transaction, as an operation."""

    work: Fenced

    def block(self, run: Run) -> tuple[Any, Ack]:
        """Run it in the handler's thread."""
        token = in_body.set(True)
        run.doing[self.work.name] = time.monotonic()
        try:
            return transactions.run_blocking(run, self.work)
        finally:
            run.doing.pop(self.work.name, None)
            in_body.reset(token)

    async def wait(self, run: Run) -> tuple[Any, Ack]:
        """Run it in the event loop."""
        token = in_body.set(True)
        run.doing[self.work.name] = time.monotonic()
        try:
            return await transactions.run_awaiting(run, self.work)
        finally:
            run.doing.pop(self.work.name, None)
            in_body.reset(token)


def transaction(
    run: Run,
    name: str,
    function: Callable[..., T],
    args: tuple[Any, ...],
    isolation: Isolation,
    options: StepOptions,
) -> Verb[T]:
    """Run `function(db, *args)` and record its result in the same commit."""
    check_name(run, name)
    record = run.journal.ask(name)
    type_ = annotation_of(function)
    if record is not None:
        value = yield from replay(name, record, type_)
    else:
        yield from start(run, name, options.inserted)
        value = yield from _perform(run, name, function, args, type_, isolation, options)
    if options.compensate is not None:
        run.register(Compensation(name, options.compensate, (value,)))
    return value  # type: ignore[no-any-return]  # what the function's annotation says


def _perform(
    run: Run,
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    type_: Any,
    isolation: Isolation,
    options: StepOptions,
) -> Verb[Any]:
    encoded = ""

    def fence(value: Any) -> Query:
        nonlocal encoded
        encoded = encode(value, type_, what=f"result of step {name!r}", limit=run.payload_limit)
        registered = options.compensate is not None
        text = record_text(run, encoded, {"compensate": True} if registered else {})
        item = Item(run.claimed.id, run.claimed.token, Checkpoint({name: text}, int(registered)))
        return protocol.checkpoint([item], run.lease)

    try:
        _, ack = yield InTransaction(Fenced(function, args, fence, isolation, name))
    except asyncio.CancelledError:
        cancelled(run, name, {})
        raise
    except (LeaseLost, TaskCanceled, ReplayError):
        raise
    except Exception as error:
        yield from failed(run, name, error, options)
    run.attempt = 1
    if ack.answer == "already":
        return convert(ack.recorded[name]["ok"], type_, what=f"recorded result of step {name!r}")
    if ack.cancel_requested:
        run.request_cancel()
    return decode(encoded, type_, what=f"result of step {name!r}")


def complete(
    run: Run, function: Callable[..., T], args: tuple[Any, ...], isolation: Isolation
) -> Verb[T]:
    """Run `function(db, *args)` and end the task as succeeded in the same commit."""
    check_name(run, "complete")
    yield from start(run, "the end", False)

    def fence(value: Any) -> Query:
        result = encode(
            value,
            run.kind.result_type,
            what=f"result of {run.kind.name}",
            limit=run.payload_limit,
        )
        item = Item(run.claimed.id, run.claimed.token, Finish(result))
        return protocol.finish([item], fenced=True)

    run.ending = True
    try:
        value, _ = yield InTransaction(Fenced(function, args, fence, isolation, "complete"))
    except BaseException:
        run.ending = False
        raise
    run.completed = True
    return value  # type: ignore[no-any-return]  # what the function returned


def enqueue(
    run: Run,
    name: str,
    target: Callable[..., Any] | str,
    input: Any,
    key: str | None,
    options: EnqueueOptions,
) -> Verb[str]:
    """Enqueue another task and record its id in the same commit."""
    kind = run.registry.resolve(target)
    encoded = client.encode_input(kind, input, run.payload_limit)
    own_key = client.check_name("key", key or f"{run.claimed.id}/{name}")

    def call() -> client.Call[Enqueued]:
        return client.enqueue(
            kind.name, kind.policy(), encoded, own_key, options.at, options.delay, options.priority
        )

    def blocking(db: Any) -> str:
        return client.run(call(), lambda query: hosts.execute(db, query)).id

    async def awaiting(db: Any) -> str:
        made = await client.run_async(call(), lambda query: hosts.execute_async(db, query))
        return made.id

    function: Callable[..., Any] = awaiting if run.kind.is_async else blocking
    made = yield from transaction(run, name, function, (), "read committed", StepOptions())
    return str(made)
