"""The plain values that the layers hand to each other; no I/O, no SQL."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from leasetask.errors import ConfigurationError

Status = Literal["pending", "running", "waiting", "succeeded", "failed", "canceled", "dead"]
FINISHED: frozenset[str] = frozenset({"succeeded", "failed", "canceled", "dead"})


LONGEST = 1e9
"""Longest duration that may be asked for, in seconds; some thirty years."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how soon something is tried again.

    Args:
        max_attempts: tries in all, the first included; at least 1.
        initial: seconds before the second try.
        factor: each later delay is the one before times this.
        max_delay: no delay is longer, in seconds.
        jitter: share by which a delay is varied at random, 0 to 1.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    max_attempts: int = 5
    initial: float = 1.0
    factor: float = 2.0
    max_delay: float = 60.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigurationError(f"Retry(max_attempts={self.max_attempts}): at least 1")
        if not (0 <= self.initial <= LONGEST and 0 <= self.max_delay <= LONGEST):
            raise ConfigurationError(f"Retry: initial and max_delay are 0 to {LONGEST:.0f} seconds")
        if not 1 <= self.factor <= LONGEST:
            raise ConfigurationError(f"Retry(factor={self.factor}): at least 1")
        if not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"Retry(jitter={self.jitter}): between 0 and 1")

    def delay(self, tries: int) -> float:
        """Return the seconds to wait after so many tries, jitter left out."""
        return min(self.max_delay, self.initial * self.factor ** min(max(tries - 1, 0), 64))


@dataclass(slots=True)
class Claimed:
    """A task that this worker holds: the row as the claim returned it."""

    id: str
    kind: str
    version: int
    key: str
    input: Any
    state: dict[str, dict[str, Any]]
    open_steps: dict[str, dict[str, Any]]
    stored_steps: int
    attempts: int
    max_attempts: int
    runs: int
    token: str
    priority: int
    due_at: datetime
    created_at: datetime
    deadline: datetime | None
    claimed_at: datetime
    cancel_requested: bool
    compensating: str | None
    last_error: dict[str, Any] | None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The answer to an enqueue.

    Attributes:
        id: the task's id, a uuid as text.
        outcome: `new`, `existing`, or, from `enqueue_many` only, `conflict`.
    """

    id: str
    outcome: Literal["new", "existing", "conflict"]


@dataclass(frozen=True, slots=True)
class TaskView:
    """What `App.get` tells of a task, read-only.

    Attributes:
        steps: names of the recorded steps, in their order.
        current_step: what it does now or did last: a step begun and not recorded, or its wait. Of a
            plain step the server learns with the next heartbeat.
        step_since: when that step began, where a heartbeat has told.
        attempts: claims since the last progress.
        runs: claims since enqueue.
        next_run_at: when it is due; None for a wait without end.
    """

    id: str
    kind: str
    version: int
    key: str
    status: Status
    priority: int
    attempts: int
    max_attempts: int
    runs: int
    input: Any
    result: Any
    last_error: dict[str, Any] | None
    steps: list[str]
    current_step: str | None
    step_since: datetime | None
    progress: dict[str, Any] | None
    wait_topic: str | None
    next_run_at: datetime | None
    lease_owner: str | None
    lease_until: datetime | None
    deadline: datetime | None
    cancel_requested_at: datetime | None
    cancel_reason: str | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None

    @property
    def finished(self) -> bool:
        """Whether the task has ended, well or not."""
        return self.status in FINISHED


@dataclass(frozen=True, slots=True)
class Swept:
    """One task that a sweep dealt with."""

    id: str
    kind: str
    outcome: str
    error: str | None


# --- what a run asks of the committer, and how it ends ---------------------------------------


@dataclass(slots=True)
class Wait:
    """A wait that a handler stands at.

    Attributes:
        mode: `sleep`, `signal` or `hurry`, as in schema.sql.
        until: the local monotonic time at which it ends, in seconds; None: no end of its own.
        snapshot: for `hurry`, the snapshot taken before the check.
    """

    mode: Literal["sleep", "signal", "hurry"]
    name: str
    seq: int | None = None
    topic: str | None = None
    until: float | None = None
    snapshot: str | None = None


@dataclass(slots=True)
class Finish:
    """The handler returned: its result as JSON text."""

    result: str


@dataclass(slots=True)
class Suspend:
    """The handler waits; `notes` holds what its other open steps need to remember."""

    wait: Wait
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Release:
    """Give the task back, to run again after `delay` seconds; `error`: what a step failed with."""

    delay: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class Fail:
    """The run raised.

    Attributes:
        retryable: with budget left the task runs again.
        outright: it ends without running its compensations.
    """

    error: dict[str, Any]
    retryable: bool
    outright: bool = False


@dataclass(slots=True)
class Lost:
    """The lease is gone: nothing is written."""

    reason: str


@dataclass(slots=True)
class Completed:
    """The handler ended its task itself, together with its last business write."""


Outcome = Finish | Suspend | Release | Fail | Lost | Completed


@dataclass(slots=True)
class Checkpoint:
    """Records to add to the task's state, as JSON text by step name."""

    records: dict[str, str]
    compensations: int = 0


@dataclass(slots=True)
class Note:
    """What to remember of steps begun and not recorded."""

    notes: dict[str, Any]
    compensations: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """The server's answer to one item of a batch.

    Attributes:
        answer: `done`, `already`, `locked` or `lost`.
        cancel_requested: a cancel was asked for.
        recorded: with `already`, the records under the patch's names.
        status: with a run's end, the task's status afterwards.
    """

    answer: str
    cancel_requested: bool = False
    recorded: dict[str, dict[str, Any]] | None = None
    status: str | None = None
