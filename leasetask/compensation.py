"""`compensate`: what undoes a step, run in reverse as recorded steps on cancel and final failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leasetask.errors import NonDeterminismError
from leasetask.journal import COMPENSATED, REGISTERED
from leasetask.model import Checkpoint
from leasetask.operations import Body, Gate, Send, Verb
from leasetask.payload import annotation_of
from leasetask.run import Compensation, Run
from leasetask.steps import DEFAULTS, check_name, perform, record_cancelled, replay, to_json


def compensate(
    run: Run, name: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Verb[None]:
    """Register what to call if the task is canceled or fails for good; a checkpoint of its own.

    Also while a cancel is pending: what it undoes has been done.
    """
    check_name(run, name)
    record = run.journal.ask(REGISTERED + name)
    if record is None:
        if not run.journal.complete:
            yield Gate(REGISTERED + name)
        run.check_usable()
        yield from record_cancelled(run)
        number = run.journal.next_number()
        yield Send(Checkpoint({REGISTERED + name: to_json({"n": number, "compensate": True})}, 1))
    run.register(Compensation(name, function, args))


def run_compensations(run: Run) -> Verb[None]:
    """Run what is outstanding, last registered first, as recorded, retried steps.

    Raises:
        NonDeterminismError: something registered was not registered again by the replay.
        StepFailed: one failed for good; the rest is not run.
    """
    registered = {c.name: c for c in run.compensations}
    outstanding = run.journal.outstanding()
    missing = [name for name in outstanding if name not in registered]
    if missing or not run.journal.complete:
        raise NonDeterminismError(
            f"{run.journal.accusation(None)}; compensations outstanding: {', '.join(outstanding)}"
        )
    for compensation in reversed(run.compensations):
        name = COMPENSATED + compensation.name
        record = run.journal.ask(name)
        if record is not None:
            yield from replay(name, record, Any)
            continue
        body = Body(compensation.function, compensation.args, {}, run.kind.timeout, name)
        yield from perform(run, name, body, annotation_of(compensation.function), DEFAULTS, {})
