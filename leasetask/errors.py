"""Every error that leasetask raises on purpose.

Each says, in one line, what happened, to which task, and what to do next.
"""

from __future__ import annotations


class LeaseTaskError(Exception):
    """Base of all errors raised by leasetask."""


class ConfigurationError(LeaseTaskError):
    """The App, a kind or a command was declared in a way that cannot work."""


class EmbeddedError(LeaseTaskError):
    """The embedded PostgreSQL server could not be started or reached."""


# --- the database -----------------------------------------------------------------------


class DatabaseUnavailable(LeaseTaskError):
    """No connection to PostgreSQL could be had (no server, wrong password, wrong name)."""


class SchemaError(LeaseTaskError):
    """The schema `leasetask` is missing, or older or newer than this library."""


# --- bad input --------------------------------------------------------------------------


class PayloadError(LeaseTaskError, ValueError):
    """A value cannot be stored as JSON exactly, is too large, or does not fit its type."""


class UnknownKind(LeaseTaskError, LookupError):
    """A function or kind that this App has not declared."""


class TaskNotFound(LeaseTaskError, LookupError):
    """No task has this id."""


class IdempotencyConflict(LeaseTaskError):
    """The key names a task that was enqueued with another input.

    Attributes:
        task_id: the id (uuid, as text) of the task that holds the key.
    """

    def __init__(self, message: str, *, task_id: str) -> None:
        super().__init__(message)
        self.task_id = task_id


class TaskRefused(LeaseTaskError):
    """The operation does not apply to the task in its present state."""


class WaitTimeout(LeaseTaskError, TimeoutError):
    """`App.wait` ran out of time before the task ended."""


class WorkerError(LeaseTaskError):
    """A worker cannot go on: one of its threads died, or too many of its handlers never end."""


# --- raised inside handlers -------------------------------------------------------------


class NonRetryable(LeaseTaskError):
    """Raise it in a handler or step: trying again would not help."""


class StepFailed(LeaseTaskError):
    """A step's budget is spent; recorded, and raised again at this step on every replay.

    Attributes:
        step: the step's name.
        number: the record's place among the task's records.
        error: the last failure as recorded: `type`, `message`, `traceback`, `attempt`, `at`.
    """

    def __init__(self, step: str, number: int, error: dict[str, object]) -> None:
        super().__init__(f"step {step!r} failed: {error.get('type')}: {error.get('message')}")
        self.step = step
        self.number = number
        self.error = error


class SignalTimeout(LeaseTaskError, TimeoutError):
    """No signal came within the `timeout` of `wait_signal`; recorded, and replayed as such.

    Attributes:
        step: the wait's name.
        number: the record's place among the task's records.
    """

    def __init__(self, message: str, *, step: str, number: int) -> None:
        super().__init__(message)
        self.step = step
        self.number = number


class EffectUnknown(LeaseTaskError):
    """Nobody can tell whether an effect happened; the task is a dead letter until a person decides.

    Attributes:
        step: the effect's name.
    """

    def __init__(self, message: str, *, step: str) -> None:
        super().__init__(message)
        self.step = step


class TaskCanceled(LeaseTaskError):
    """The task was asked to cancel: no further step starts."""


class LeaseLost(LeaseTaskError):
    """The lease ended or went to another worker: nothing this run does is recorded any more."""


class RunTimeout(LeaseTaskError, TimeoutError):
    """One run of a step or handler took longer than its `timeout`."""


class ReplayError(LeaseTaskError):
    """Base of the errors by which a replay refuses to go on; none of them is retried."""


class NonDeterminismError(ReplayError):
    """The handler, replayed, did not ask for what an earlier run recorded."""


class DuplicateStep(ReplayError):
    """Two steps of one task use the same name."""


class ConcurrentWait(ReplayError):
    """A second wait was begun while the task already waits."""


class SuspensionSwallowed(ReplayError):
    """The handler caught the suspension and went on, so the run cannot be trusted."""
