"""`effect`: what happens outside and must not happen twice; a ledger of starts and ends.

A start is committed before `do` runs. A later run that finds a start asks `reconcile` what became of
it before `do` may be called again; where that cannot be told, a person decides.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from leasetask.errors import EffectUnknown, LeaseLost, ReplayError, TaskCanceled
from leasetask.journal import Record
from leasetask.model import Note
from leasetask.operations import Body, Gate, Send, Verb
from leasetask.payload import annotation_of, encode
from leasetask.run import Compensation, Run
from leasetask.steps import (
    StepOptions,
    cancelled,
    check_name,
    failed,
    replay,
    start,
    write_record,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of an effect.

    Attributes:
        key: the same for every attempt of this effect, to hand to an API that takes an
            idempotency key.
        number: which start this is, from 1.
        token: this start's own, to be fenced with outside.
    """

    key: str
    number: int
    token: str


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """`reconcile` found that it happened, with this result."""

    result: T


@dataclass(frozen=True, slots=True)
class NotDone:
    """`reconcile` is certain that it did not happen: do it again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """`reconcile` cannot tell, for this reason: the task waits for a person."""

    reason: str


Reconciled = Done[Any] | NotDone | Unknown


def effect(
    run: Run,
    name: str,
    do: Callable[[Attempt], T],
    reconcile: Callable[[Attempt], Any],
    options: StepOptions,
) -> Verb[T]:
    """Do something outside once, looking before it is done again."""
    check_name(run, name)
    record = run.journal.ask(name)
    type_ = annotation_of(do)
    if record is not None:
        value = yield from replay(name, record, type_)
    else:
        if run.journal.open_step(name).get("compensate"):
            # It may have happened: also on the way to compensations that must be found out first.
            if not run.journal.complete:
                yield Gate(name)
            run.check_usable()
        else:
            yield from start(run, name, options.inserted)
        value = yield from _perform(run, name, do, reconcile, type_, options)
    if options.compensate is not None:
        run.compensations.append(Compensation(name, options.compensate, (value,)))
    return value  # type: ignore[no-any-return]  # what `do` is annotated with


def _perform(
    run: Run,
    name: str,
    do: Callable[[Attempt], Any],
    reconcile: Callable[[Attempt], Any],
    type_: Any,
    options: StepOptions,
) -> Verb[Any]:
    key = f"{run.claimed.id}/{name}"
    ledger = dict(run.journal.open_step(name))
    timeout = options.timeout or run.kind.timeout
    try:
        found: Reconciled = NotDone()
        if ledger.get("started", 0) > ledger.get("settled", 0):
            before = Attempt(key, ledger["started"], ledger["token"])
            found = yield Body(reconcile, (before,), {}, timeout, f"{name} (reconcile)")
        if isinstance(found, Unknown):
            raise EffectUnknown(
                f"task {run.claimed.id}: nobody can tell whether effect {name!r} happened: "
                f"{found.reason}; decide with `leasetask resolve {run.claimed.id} {name} "
                "--done JSON` or `--redo`",
                step=name,
            )
        if isinstance(found, Done):
            value = found.result
        else:
            ledger["settled"] = ledger.get("started", 0)
            run.check_startable()
            yield from _note_start(run, name, ledger, options)
            value = yield Body(
                do, (Attempt(key, ledger["started"], ledger["token"]),), {}, timeout, name
            )
            ledger["ended"] = ledger.get("ended", 0) + 1
        encoded = encode(value, type_, what=f"result of effect {name!r}", limit=run.payload_limit)
    except asyncio.CancelledError:
        # With a compensation it stays open: whether it happened must be found out before that runs.
        if "compensate" not in ledger:
            yield from cancelled(
                run, name, {k: ledger[k] for k in ("started", "ended") if k in ledger}
            )
        raise
    except (LeaseLost, TaskCanceled, ReplayError, EffectUnknown):
        raise
    except Exception as error:
        run.journal.remember(name, ledger)
        yield from failed(run, name, error, options)
    extra: Record = {k: ledger[k] for k in ("started", "ended", "compensate") if k in ledger}
    return (yield from write_record(run, name, encoded, type_, extra))


def _note_start(run: Run, name: str, ledger: Record, options: StepOptions) -> Verb[None]:
    """Commit the start; with `compensate`, the registration with it: from here on it may happen."""
    first = "started" not in ledger
    ledger["started"] = ledger.get("started", 0) + 1
    ledger["token"] = secrets.token_hex(8)
    if options.compensate is not None:
        ledger["compensate"] = True
    yield Send(Note({name: ledger}, int(first and "compensate" in ledger)))
