"""The protocol in plain Python: what each function of schema.sql answers and leaves behind.

One method for each function, on dataclasses whose fields have the columns' names. Times are seconds
on the test's clock. Where the design leaves a choice open (which of two equally good tasks a claim
takes, in which order a sweep goes), the method is told what the database chose and judges that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any
from uuid import UUID

Json = Any
Answer = tuple[Any, ...]

DAY = 86400.0


def moment(at: float | None) -> float:
    """Return a time; none at all never comes."""
    return inf if at is None else at


FINISHED = ("succeeded", "failed", "canceled", "dead")


@dataclass
class Task:
    """A row of leasetask.task, with all records in `steps`, wherever they are kept."""

    id: UUID
    kind: str
    idempotency_key: str
    input: Json
    priority: int
    max_attempts: int
    next_run_at: float
    created_at: float
    deadline: float | None
    deadline_after: float | None
    status: str = "pending"
    steps: dict[str, Json] = field(default_factory=dict)
    open_steps: dict[str, Json] = field(default_factory=dict)
    attempts: int = 0
    runs: int = 0
    claimed_at: float | None = None
    lease_owner: str | None = None
    lease_until: float | None = None
    lease_token: UUID | None = None
    released_token: UUID | None = None
    abandoned: bool = False
    swept: int = 0
    suspect: bool = False
    wait_mode: str | None = None
    wait_name: str | None = None
    wait_seq: int | None = None
    wait_topic: str | None = None
    wait_until: float | None = None
    waiting_since: float | None = None
    undelivered: bool = False
    cancel_requested_at: float | None = None
    cancel_reason: str | None = None
    compensations: int = 0
    compensating: str | None = None
    progress: Json = None
    result: Json = None
    last_error: Json = None
    dead_letter_at: float | None = None
    finished_at: float | None = None
    pruned_at: float | None = None
    known_signals: int = 0
    """Stands for wait_snapshot: signals up to this id were known before the check."""
    first_input: Json = None
    """Stands for input_hash: what the key was first used with."""

    @property
    def cancel_pending(self) -> bool:
        """Whether a cancel was asked for that has not led to compensations."""
        return self.cancel_requested_at is not None and self.compensating is None

    def backoff(self) -> float:
        """Return the delay before the next try: 1 s, 2 s, 4 s … 60 s, as the tests enqueue."""
        return float(min(60, 2 ** max(self.attempts - 1, 0)))

    def leave_wait(self) -> None:
        """Wait for nothing any more."""
        self.wait_mode = self.wait_name = self.wait_topic = None
        self.wait_seq = self.wait_until = self.waiting_since = None
        self.undelivered = False

    def leave_lease(self, *, own: bool) -> None:
        """Be nobody's; if its own worker ended the lease, remember the token."""
        if own and self.lease_token is not None:
            self.released_token = self.lease_token
        self.lease_owner = self.lease_until = self.lease_token = None
        self.abandoned = False


@dataclass
class Signal:
    """A row of leasetask.task_signal."""

    id: int
    topic: str
    payload: Json
    sticky: bool
    created_at: float
    consumed_by: UUID | None = None
    consumed_at: float | None = None
    undelivered: bool = True


@dataclass(frozen=True)
class Wait:
    """What a suspension asks for."""

    mode: str
    name: str
    seq: int | None
    topic: str | None
    seconds: float | None
    known_signals: int = 0


Handle = tuple[UUID, UUID | None]
"""A task and a token, current or not."""


class Model:
    """Everything that the database should hold."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tasks: dict[UUID, Task] = {}
        self.signals: dict[int, Signal] = {}
        self.lost_owners: dict[str, tuple[int, float]] = {}

    # --- what several share -------------------------------------------------------------------

    def _take(self, handle: Handle) -> tuple[Task | None, bool, bool]:
        """Judge an item by its token: the task, whether it is held, whether a cancel is pending."""
        task = self.tasks.get(handle[0])
        if task is None:
            return None, False, False
        held = handle[1] is not None and task.lease_token == handle[1]
        return task, held, task.cancel_pending

    def _ended(self, handle: Handle, held: bool) -> Answer:
        task = self.tasks.get(handle[0])
        if task is None:
            return ("lost", None)
        repeated = task.released_token is not None and task.released_token == handle[1]
        return ("done" if held or repeated else "lost", task.status)

    def _end_or_compensate(self, task: Task, ending: str, error: Json, *, own: bool) -> None:
        unwind = task.compensations > 0 and task.compensating is None
        if unwind:
            task.status, task.compensating = "pending", ending
            task.attempts, task.next_run_at = 0, self.now
        else:
            task.status, task.finished_at = ending, self.now
            task.dead_letter_at = None if ending == "canceled" else self.now
        task.last_error = error or task.last_error
        task.leave_lease(own=own)
        task.leave_wait()
        task.swept, task.suspect = 0, False

    # --- enqueue and claim --------------------------------------------------------------------

    def enqueue(
        self,
        id: UUID,
        kind: str,
        key: str | None,
        input: Json,
        *,
        delay: float = 0,
        priority: int = 0,
        max_attempts: int = 5,
        deadline: float | None = None,
    ) -> Answer:
        """Enqueue under the id that the database chose, if the key is new."""
        key = str(id) if key is None else key
        for task in self.tasks.values():
            if (task.kind, task.idempotency_key) == (kind, key):
                equal = task.first_input == input
                shown = None if equal or task.pruned_at is not None else task.input
                return (task.id, "existing" if equal else "conflict", shown)
        self.tasks[id] = Task(
            id, kind, key, input, priority, max_attempts, self.now + delay, self.now,
            None if deadline is None else self.now + deadline, deadline, first_input=input,
        )  # fmt: skip
        return (id, "new", None)

    def claimable(self, kinds: Sequence[str], *, suspects: bool) -> list[Task]:
        """Return what may be claimed, the first first."""
        due = [
            task
            for task in self._lanes(kinds, suspects=suspects)
            if task.next_run_at <= self.now
            and (task.deadline is None or task.deadline > self.now or task.compensating)
        ]
        return sorted(due, key=self._order)

    def _lanes(self, kinds: Sequence[str], *, suspects: bool) -> list[Task]:
        return [
            task
            for task in self.tasks.values()
            if task.status in ("pending", "waiting")
            and task.kind in kinds
            and task.suspect == suspects
        ]

    @staticmethod
    def _order(task: Task) -> tuple[int, float]:
        return task.priority, task.next_run_at

    def claim(
        self,
        owner: str,
        kinds: Sequence[str],
        n: int,
        lease: float,
        chosen: Sequence[Handle],
        *,
        suspects: bool,
    ) -> float:
        """Check the database's choice and take it; return when the next is due."""
        claimable = self.claimable(kinds, suspects=suspects)
        tasks = [self.tasks[id] for id, _ in chosen]
        best = [self._order(task) for task in claimable[:n]]
        assert sorted(map(self._order, tasks)) == best, "a claim takes the first in the order"
        assert all(task in claimable for task in tasks)
        held = {task.lease_token for task in self.tasks.values()}
        for task, (_, token) in zip(tasks, chosen, strict=True):
            assert token not in held, "a token is new at every claim"
            if task.wait_mode in ("sleep", "signal"):
                assert task.wait_name is not None
                task.steps[task.wait_name] = {"n": task.wait_seq, "timeout": True}
            task.status, task.claimed_at = "running", self.now
            task.attempts, task.runs = task.attempts + 1, task.runs + 1
            task.lease_owner, task.lease_until = owner, self.now + lease
            task.lease_token = token
            task.leave_wait()
        later = (t.next_run_at for t in self._lanes(kinds, suspects=suspects))
        return min((at for at in later if at > self.now), default=inf)

    # --- while it runs ------------------------------------------------------------------------

    def heartbeat(self, handle: Handle, lease: float, progress: Json) -> Answer:
        """Extend a lease."""
        task, held, cancel = self._take(handle)
        if task is not None and held:
            self._renew(task, lease)
            task.progress = progress or task.progress
        return ("done" if held else "lost", cancel)

    def _renew(self, task: Task, lease: float) -> None:
        if not task.abandoned:
            task.lease_until = self.now + lease

    def checkpoint(
        self, handle: Handle, patch: dict[str, Json], lease: float, registered: int
    ) -> Answer:
        """Record steps, all of a patch or nothing."""
        task, held, cancel = self._take(handle)
        if task is None or not held:
            return ("lost", cancel, None)
        recorded = {name: task.steps[name] for name in patch if name in task.steps}
        if recorded:
            return ("already", cancel, recorded)
        task.steps |= patch
        task.open_steps = {k: v for k, v in task.open_steps.items() if k not in patch}
        task.compensations += registered
        task.attempts = 0 if task.abandoned else 1
        task.swept, task.suspect = 0, False
        self._renew(task, lease)
        return ("done", cancel, None)

    def note(self, handle: Handle, patch: dict[str, Json], lease: float) -> Answer:
        """Note what is known of open steps."""
        task, held, cancel = self._take(handle)
        if task is None or not held:
            return ("lost", cancel)
        known = task.open_steps
        if all(name in known and patch[name].items() <= known[name].items() for name in patch):
            return ("already", cancel)
        task.open_steps |= patch
        self._renew(task, lease)
        return ("done", cancel)

    def abandon(self, handle: Handle, seconds: float) -> Answer:
        """Let a lease end soon, uncharged."""
        task, held, _ = self._take(handle)
        if task is not None and held and not task.abandoned:
            task.lease_until, task.abandoned = self.now + seconds, True
            task.attempts = max(task.attempts - 1, 0)
        return ("done" if held else "lost",)

    # --- the ends of a run --------------------------------------------------------------------

    def finish(self, handle: Handle, result: Json) -> Answer:
        """End a task as succeeded, or as was decided before its compensations ran."""
        task, held, _ = self._take(handle)
        if task is not None and held:
            task.status = task.compensating or "succeeded"
            task.result, task.finished_at = result, self.now
            task.dead_letter_at = self.now if task.status in ("failed", "dead") else None
            task.leave_lease(own=True)
        return self._ended(handle, held)

    def suspend(self, handle: Handle, wait: Wait) -> Answer:
        """Let a task wait."""
        task, held, cancel = self._take(handle)
        if task is not None and held and cancel:
            self._end_or_compensate(task, "canceled", None, own=True)
        elif task is not None and held:
            until = None if wait.seconds is None else self.now + wait.seconds
            task.status = "waiting"
            task.attempts, task.swept, task.suspect = 0, 0, False
            task.wait_mode, task.wait_name, task.wait_seq = wait.mode, wait.name, wait.seq
            task.wait_topic, task.wait_until, task.waiting_since = wait.topic, until, self.now
            task.known_signals = wait.known_signals
            task.undelivered = wait.topic is not None
            task.next_run_at = min(moment(until), moment(task.deadline))
            task.open_steps.pop(wait.name, None)
            task.leave_lease(own=True)
        return self._ended(handle, held)

    def release(self, handle: Handle, delay: float | None, note: dict[str, Json]) -> Answer:
        """Give a task back uncharged."""
        task, held, cancel = self._take(handle)
        if task is not None and held and cancel:
            self._end_or_compensate(task, "canceled", None, own=True)
        elif task is not None and held:
            task.status = "pending"
            task.attempts = max(task.attempts - (not task.abandoned), 0)
            old_place = min(task.next_run_at, self.now)
            task.next_run_at = self.now + delay if delay else old_place
            task.open_steps |= note
            task.leave_lease(own=True)
        return self._ended(handle, held)

    def fail(self, handle: Handle, error: Json, *, retryable: bool, outright: bool) -> Answer:
        """End a run with an error."""
        task, held, cancel = self._take(handle)
        if task is not None and held:
            tries = task.attempts + task.abandoned
            retry = retryable and not outright and tries < task.max_attempts
            if retry and not cancel:
                task.status, task.attempts = "pending", tries
                task.next_run_at = self.now + task.backoff()
                task.last_error = task.last_error if task.compensating else error
                task.leave_lease(own=True)
            else:
                if outright and task.compensating is None:
                    task.compensations = 0
                self._end_or_compensate(task, "canceled" if retry else "failed", error, own=True)
        return self._ended(handle, held)

    # --- signals ------------------------------------------------------------------------------

    def signal(self, id: int, topic: str, payload: Json, *, sticky: bool) -> None:
        """Insert a signal."""
        assert id > max(self.signals, default=0)
        self.signals[id] = Signal(id, topic, payload, sticky, self.now)

    def clear_signal(self, topic: str) -> bool:
        """End a topic's latch."""
        latches = [s.id for s in self.signals.values() if s.topic == topic and s.sticky]
        for id in latches:
            del self.signals[id]
        return bool(latches)

    def deliver(self, topic: str) -> Answer:
        """Pair a topic's signals with its waiters, fewer than a hundred of each."""
        signals = [s for s in self.signals.values() if s.topic == topic]
        free = [s for s in signals if not s.sticky and s.consumed_by is None]
        latch = max((s for s in signals if s.sticky), key=lambda s: s.id, default=None)
        waiting = [t for t in self.tasks.values() if t.wait_topic == topic]
        waiting.sort(key=lambda task: (task.waiting_since, task.id))
        woken = 0
        for task in waiting:
            if task.wait_mode == "hurry":
                if not any(s.id > task.known_signals for s in signals):
                    continue
            elif found := free.pop(0) if free else latch:
                if found is not latch:
                    found.consumed_by, found.consumed_at = task.id, self.now
                assert task.wait_name is not None
                record = {"n": task.wait_seq, "ok": found.payload, "signal": found.id}
                task.steps[task.wait_name] = record
            else:
                continue
            task.leave_wait()
            task.next_run_at = self.now
            woken += 1
        for looked_at in (*waiting, *signals):
            looked_at.undelivered = False
        return (woken, False)

    def undelivered_topics(self) -> set[str]:
        """Return the topics that nobody has looked at."""
        marked = {s.topic for s in self.signals.values() if s.undelivered}
        return marked | {
            t.wait_topic for t in self.tasks.values() if t.undelivered and t.wait_topic
        }

    # --- cancel, sweep, retry, prune ----------------------------------------------------------

    def cancel(self, id: UUID, reason: str) -> str:
        """Cancel a task that exists."""
        task = self.tasks[id]
        if task.finished_at is not None:
            return "finished"
        if task.compensating:
            return "compensating"
        if task.cancel_requested_at is None:
            task.cancel_requested_at, task.cancel_reason = self.now, reason
        if task.status == "running":
            return "requested"
        self._end_or_compensate(task, "canceled", None, own=False)
        return "compensating" if task.compensating else "canceled"

    def sweep(self, n: int, rows: Sequence[tuple[UUID, str]]) -> None:
        """Check what a sweep of at most n says that it did, and do it."""
        held: dict[str, int] = {}
        for task in self.tasks.values():
            if task.lease_owner is not None:
                held[task.lease_owner] = held.get(task.lease_owner, 0) + 1
        out = {t.id for t in self.tasks.values() if moment(t.lease_until) < self.now}
        leases, expiries = rows[: len(out)], rows[len(out) :]
        assert {id for id, _ in leases} <= out
        assert len(leases) == min(n, len(out)), "a sweep takes all that it may"
        for id, outcome in leases:
            owner = self.tasks[id].lease_owner
            assert owner is not None
            before, noticed = self.lost_owners.get(owner, (0, self.now))
            company = max(before, held[owner])
            self.lost_owners[owner] = (company, noticed)
            assert outcome == self._sweep_lease(self.tasks[id], company)
        late = [
            task
            for task in self.tasks.values()
            if task.status in ("pending", "waiting")
            and moment(task.deadline) <= self.now
            and task.compensating is None
        ]
        assert len(expiries) == min(n - len(leases), len(late))
        for id, outcome in expiries:
            assert self.tasks[id] in late
            assert outcome == "expired"
            error = {"type": "DeadlineExceeded"}
            self._end_or_compensate(self.tasks[id], "failed", error, own=False)
        for owner, (_, noticed) in list(self.lost_owners.items()):
            if noticed < self.now - DAY:
                del self.lost_owners[owner]

    def _sweep_lease(self, task: Task, held: int) -> str:
        company = held > 1
        error = {"type": "LeaseExpired"}
        unwinds = task.compensations > 0 and task.compensating is None
        if task.cancel_pending:
            self._end_or_compensate(task, "canceled", None, own=False)
            return "compensating" if unwinds else "canceled"
        if not company and not task.abandoned and task.attempts >= task.max_attempts:
            self._end_or_compensate(task, "dead", error, own=False)
            return "compensating" if unwinds else "dead"
        spent = task.attempts >= task.max_attempts
        if company and not task.abandoned:
            task.suspect = task.suspect or task.swept > 0 or spent
            task.swept += 1
        first = task.attempts <= 1 or task.abandoned
        old_place = min(task.next_run_at, self.now)
        task.next_run_at = old_place if first else self.now + task.backoff()
        task.last_error = task.last_error if task.abandoned else error
        task.status, task.attempts = "pending", min(task.attempts, task.max_attempts - 1)
        task.leave_lease(own=False)
        return "suspect" if task.suspect else "recovered"

    def retry(self, id: UUID) -> bool:
        """Give a task another chance; return whether that is allowed."""
        task = self.tasks[id]
        if task.compensating or task.dead_letter_at is None or task.pruned_at is not None:
            return False
        since = (task.last_error or {}).get("n", inf)
        task.steps = {name: r for name, r in task.steps.items() if r["n"] < since}
        task.compensations = sum("compensate" in r for r in task.steps.values())
        task.open_steps = {
            name: {k: v for k, v in note.items() if k != "tries"}
            for name, note in task.open_steps.items()
            if "started" in note
        }
        task.status, task.attempts, task.swept, task.suspect = "pending", 0, 0, False
        task.next_run_at = self.now
        task.deadline = None if task.deadline_after is None else self.now + task.deadline_after
        task.dead_letter_at = task.finished_at = None
        task.cancel_requested_at = task.cancel_reason = None
        return True

    def prune(self, age: float, signal_age: float, *, forget_keys: bool) -> int:
        """Empty or forget what is old; return how many rows that were."""
        old = [
            task
            for task in self.tasks.values()
            if moment(task.finished_at) < self.now - age and (forget_keys or task.pruned_at is None)
        ]
        for task in old:
            if forget_keys:
                del self.tasks[task.id]
            else:
                task.input = task.result = task.progress = None
                task.steps, task.open_steps = {}, {}
                task.pruned_at = self.now
        gone = [s.id for s in self.signals.values() if self._signal_is_old(s, age, signal_age)]
        for id in gone:
            del self.signals[id]
        return len(old) + len(gone)

    def _signal_is_old(self, signal: Signal, age: float, signal_age: float) -> bool:
        age = max(age, DAY)
        if signal.consumed_at is not None:
            return signal.consumed_at < self.now - age
        if not signal.sticky:
            return signal.created_at < self.now - signal_age
        newer = (s for s in self.signals.values() if s.topic == signal.topic and s.sticky)
        return signal.created_at < self.now - age and any(s.id > signal.id for s in newer)

    # --- for the tests ------------------------------------------------------------------------

    def finished(self) -> dict[UUID, Task]:
        """Return copies of the tasks that have ended."""
        return {t.id: copy.deepcopy(t) for t in self.tasks.values() if t.status in FINISHED}
