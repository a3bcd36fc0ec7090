"""Durable tasks in your own PostgreSQL: leases, recorded steps, persisted signals."""

from leasetask.app import App, RunningWorker
from leasetask.context import AsyncContext, Context
from leasetask.effects import Attempt, Done, NotDone, Unknown
from leasetask.errors import (
    IdempotencyConflict,
    LeaseLost,
    LeaseTaskError,
    NonRetryable,
    PayloadError,
    SignalTimeout,
    StepFailed,
    TaskCanceled,
)
from leasetask.model import Enqueued, Retry, TaskView

__version__ = "0.1.0"

__all__ = [
    "App",
    "AsyncContext",
    "Attempt",
    "Context",
    "Done",
    "Enqueued",
    "IdempotencyConflict",
    "LeaseLost",
    "LeaseTaskError",
    "NonRetryable",
    "NotDone",
    "PayloadError",
    "Retry",
    "RunningWorker",
    "SignalTimeout",
    "StepFailed",
    "TaskCanceled",
    "TaskView",
    "Unknown",
]
