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

from leasetask.errors import EffectUnknown, LeaseLost, ReplayError, StepFailed, TaskCanceled
from leasetask.failures import message_of
from leasetask.journal import Record
from leasetask.model import Note
from leasetask.operations import Body, Gate, Send, Verb
from leasetask.payload import annotation_of, encode
from leasetask.run import Compensation, Run
from leasetask.steps import (
    StepOptions,
    again,
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
        run.register(Compensation(name, options.compensate, (value,)))
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
    asking = ledger.get("started", 0) > ledger.get("settled", 0)
    try:
        found: Reconciled = NotDone()
        if asking:
            before = Attempt(key, ledger["started"], ledger.get("token", ""))
            found = yield Body(reconcile, (before,), {}, timeout, f"{name} (reconcile)")
            asking = False
        if isinstance(found, Unknown):
            raise unknown(run, name, found.reason)
        if isinstance(found, Done):
            value = found.result
        else:
            ledger["settled"] = ledger.get("started", 0)
            run.journal.remember(name, ledger)
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
            cancelled(run, name, _kept(ledger))
        raise
    except (LeaseLost, TaskCanceled, ReplayError, EffectUnknown):
        raise
    except Exception as error:
        run.journal.remember(name, ledger)
        if asking and again(run, name, error, options) is None:
            raise unknown(run, name, f"reconcile failed: {message_of(error)}") from error
        # Without `compensate`: who asks for it again, after a retry, looks before it is done again.
        kept = {k: v for k, v in _kept(ledger).items() if k != "compensate"}
        try:
            yield from failed(run, name, error, options, kept)
        except StepFailed:
            run.journal.close(name)
            raise
    value = yield from write_record(run, name, encoded, type_, _kept(ledger))
    run.journal.close(name)
    return value


def _kept(ledger: Record) -> Record:
    """Return what a record keeps of an effect's ledger; a retry goes on from there."""
    kept = ("started", "token", "settled", "ended", "compensate")
    return {key: ledger[key] for key in kept if key in ledger}


def unknown(run: Run, name: str, reason: str) -> EffectUnknown:
    """Return the error for an effect that a person has to decide on."""
    return EffectUnknown(
        f"task {run.claimed.id}: nobody can tell whether effect {name!r} happened: {reason}; "
        f"decide with `leasetask resolve {run.claimed.id} {name} --done JSON` or `--redo`",
        step=name,
    )


def _note_start(run: Run, name: str, ledger: Record, options: StepOptions) -> Verb[None]:
    """Commit the start; with `compensate`, the registration with it: from here on it may happen."""
    first = "started" not in ledger
    ledger["started"] = ledger.get("started", 0) + 1
    ledger["token"] = secrets.token_hex(8)
    if options.compensate is not None:
        ledger["compensate"] = True
    yield Send(Note({name: ledger}, int(first and "compensate" in ledger)))
