"""What several actors do beside each other, and what must hold in whatever order they do it.

Each function gives a program for `Explorer.explore`. A caller has its transaction in an isolation
level and commits or rolls back; it may be blocked, and may get an ordinary 40001, never a deadlock.
Programs about what happens *inside* a function need a database with gates.
"""

from __future__ import annotations

from typing import Any

import invariants
from calls import KIND, LEASE, Session
from interleave import (
    READ_COMMITTED,
    SERIALIZATION_FAILURE,
    Actor,
    Memory,
    Program,
    RolledBack,
    Run,
    Step,
)

OUT = LEASE + 1
"""A time at which leases that began at 0 are out."""

may_fail = frozenset({SERIALIZATION_FAILURE})


# --- steps --------------------------------------------------------------------------------------


def look(session: Session, memory: Memory) -> None:
    """Take the snapshot of a transaction that keeps one."""
    session.rows("select 1")


def signal(session: Session, memory: Memory) -> int:
    return session.signal("t", {"paid": True})


def signal_now(session: Session, memory: Memory) -> Any:
    return session.call("signal_now", topic="t", payload={"paid": True})


def deliver(session: Session, memory: Memory) -> Any:
    return session.deliver()


def poll(session: Session, memory: Memory) -> None:
    session.poll()


def cancel(session: Session, memory: Memory) -> str:
    return session.cancel(memory["id"])


def claim(session: Session, memory: Memory) -> Any:
    return session.claim("claimer", 1)


def suspend(session: Session, memory: Memory) -> Any:
    return session.suspend(memory["id"], memory["token"])


def sweep(session: Session, memory: Memory) -> Any:
    return session.call("sweep")


def in_turn(*steps: Step) -> Step:
    """Several calls, each in its own transaction, with nothing of the others between."""
    return lambda session, memory: [step(session, memory) for step in steps][-1]


def caller(step: Step, isolation: str, commits: bool) -> Actor:
    """A user's transaction; where a snapshot is kept, it was taken some time before the step."""
    steps = (step,) if isolation == READ_COMMITTED else (look, step)
    return Actor("caller", steps, isolation, commits)


# --- preparations -------------------------------------------------------------------------------


def running(session: Session) -> Memory:
    id, token = session.run("a")
    return {"id": id, "token": token}


def two_waiters(session: Session, **how: Any) -> Memory:
    """The older one, `id`, times out at 5; both have been looked at."""
    first = session.wait("a", seconds=5, **how)
    session.at(1)
    second = session.wait("b", **how)
    session.deliver_all()
    return {"id": first, "other": second}


def two_waiters_and_a_signal(session: Session) -> Memory:
    memory = two_waiters(session)
    memory["signal"] = session.signal()
    return memory


# --- what holds after every order ---------------------------------------------------------------


def state_of(run: Run, id: str) -> Any:
    return run.session.task(id)


def woken(run: Run, id: str) -> bool:
    """Whether a waiter has its signal recorded."""
    return "ok" in run.session.task(id).state.get("wait", {})


def nothing_is_lost(run: Run) -> None:
    invariants.check_delivered(run.session)


# ═══ Signals and waits ═════════════════════════════════════════════════════════════════════════


def a_signal_meets_a_task_that_goes_to_wait(isolation: str, commits: bool, waiter: str) -> Program:
    """H28, H44, invariant 4: the waiter is woken if and only if the caller committed.

    Also when the suspending worker or the deliverer dies between its commit and its delivery.
    """

    def check(run: Run) -> None:
        nothing_is_lost(run)
        assert woken(run, run.memory["id"]) == run.committed("caller")
        if commits:
            assert run.committed("caller") or isolation != READ_COMMITTED

    worker = {
        "in a transaction": Actor("worker", (suspend,), READ_COMMITTED),
        "and delivers": Actor("worker", (suspend, deliver)),
        "and dies": Actor("worker", (suspend,)),
    }[waiter]
    return Program(
        "signal vs. going to wait",
        (caller(signal, isolation, commits), worker, Actor("poll", (poll,))),
        running,
        check,
        may_fail,
    )


def a_wait_for_meets_a_signal(isolation: str, commits: bool) -> Program:
    """Decision 6: a signal committed after the check began hurries, one before never does."""

    def check_begins(session: Session, memory: Memory) -> None:
        memory["snapshot"] = session.scalar("select pg_current_snapshot()::text")

    def business_check(session: Session, memory: Memory) -> bool:
        return bool(session.scalar("select exists (select from leasetask.task_signal)"))

    def wait_for(session: Session, memory: Memory) -> Any:
        snapshot = memory["snapshot"]
        return session.suspend(
            memory["id"], memory["token"], mode="hurry", seq=None, snapshot=snapshot
        )

    def check(run: Run) -> None:
        nothing_is_lost(run)
        seen = run.result("worker", 1)
        hurried = state_of(run, run.memory["id"]).wait_mode is None
        assert not seen or run.committed("caller")
        if not run.committed("caller"):
            assert not hurried
        elif not seen:
            assert hurried
        assert run.session.task(run.memory["id"]).state == {}

    return Program(
        "signal vs. wait_for",
        (
            Actor("caller", (signal,), isolation, commits),
            Actor("worker", (check_begins, business_check, wait_for)),
            Actor("poll", (poll,)),
        ),
        running,
        check,
        may_fail,
    )


def two_signals_meet_two_waiters(isolation: str, commits: bool) -> Program:
    """H28: each committed signal wakes exactly one waiter; a rolled-back one takes none with it."""

    def begin(session: Session) -> Memory:
        first, second = session.run("a"), session.run("b")
        return {"ids": [first[0], second[0]], "tokens": [first[1], second[1]]}

    def suspend_both(session: Session, memory: Memory) -> Any:
        return session.call(
            "suspend",
            ids=memory["ids"],
            tokens=memory["tokens"],
            modes=["signal"] * 2,
            names=["wait"] * 2,
            seqs=[1, 1],
            topics=["t", "t"],
            seconds=[None, None],
            untils=[None, None],
            snapshots=[None, None],
        )

    def check(run: Run) -> None:
        nothing_is_lost(run)
        sent = run.committed("caller") + run.committed("other")
        assert sum(woken(run, id) for id in run.memory["ids"]) == sent
        consumed = "select count(*) from leasetask.task_signal where consumed_by is not null"
        assert run.session.scalar(consumed) == sent

    return Program(
        "two signals vs. two waiters",
        (
            Actor("caller", (signal,), isolation, commits),
            Actor("other", (signal, deliver)),
            Actor("worker", (suspend_both, deliver)),
        ),
        begin,
        check,
        may_fail,
    )


def two_deliverers_and_a_claim() -> Program:
    """H28: one signal, two waiters, the older of which is claimed by its time: either gets it."""

    def check(run: Run) -> None:
        nothing_is_lost(run)
        timed_out = "timeout" in run.session.task(run.memory["id"]).state.get("wait", {})
        assert woken(run, run.memory["other"]) == timed_out
        assert woken(run, run.memory["id"]) != timed_out
        assert all(run.outcomes[name].blocked == 0 for name in run.outcomes)

    return Program(
        "two deliverers and a claim",
        (
            Actor("one", (deliver,), READ_COMMITTED, at=10),
            Actor("two", (deliver,), READ_COMMITTED, at=10),
            Actor("claimer", (claim,), READ_COMMITTED, at=10),
        ),
        two_waiters_and_a_signal,
        check,
    )


def a_cancel_meets_the_delivery(isolation: str, commits: bool, signals: int) -> Program:
    """A waiter that is canceled before delivery leaves the signal to the next (decision 6)."""

    def begin(session: Session) -> Memory:
        memory = two_waiters(session)
        for _ in range(signals):
            session.signal()
        return memory

    def check(run: Run) -> None:
        nothing_is_lost(run)
        canceled = run.committed("caller")
        older, newer = woken(run, run.memory["id"]), woken(run, run.memory["other"])
        assert (state_of(run, run.memory["id"]).status == "canceled") == canceled
        assert older or canceled, "the longest waiter comes first"
        assert newer == (signals == 2 or not older)
        assert run.outcomes["deliverer"].blocked == 0

    return Program(
        f"cancel vs. deliver of {signals}",
        (
            caller(cancel, isolation, commits),
            Actor("deliverer", (deliver, deliver)),
            Actor("poll", (poll,)),
        ),
        begin,
        check,
        may_fail,
    )


def a_latch_is_cleared_beside_its_delivery(isolation: str, commits: bool) -> Program:
    """A latch wakes whoever waited while it stood; nobody sleeps beside one that stands."""

    def begin(session: Session) -> Memory:
        memory = running(session)
        session.signal("t", "open", sticky=True)
        return memory

    def check(run: Run) -> None:
        nothing_is_lost(run)
        stands = run.session.scalar("select count(*) from leasetask.task_signal") == 1
        assert stands != run.committed("caller")
        assert woken(run, run.memory["id"]) or not stands

    def clear(session: Session, memory: Memory) -> Any:
        return session.value("clear_signal", topic="t")

    return Program(
        "clear vs. deliver",
        (
            caller(clear, isolation, commits),
            Actor("worker", (suspend, deliver)),
            Actor("poll", (poll,)),
        ),
        begin,
        check,
        may_fail,
    )


# ═══ Leases ════════════════════════════════════════════════════════════════════════════════════


def a_fenced_write_meets_the_sweep(isolation: str, commits: bool) -> Program:
    """H02, H04, invariants 1, 2, 8: the write is there if and only if its checkpoint is."""

    def business(session: Session, memory: Memory) -> None:
        insert = "insert into ledger values (gen_random_uuid()) returning payment"
        memory["payment"] = session.scalar(insert)

    def fence(session: Session, memory: Memory) -> str:
        ack = session.checkpoint(memory["id"], memory["token"], {"pay": {"n": 1, "ok": "first"}})
        if ack.answer != "done":
            raise RolledBack
        return str(ack.answer)

    def next_owner(session: Session, memory: Memory) -> str | None:
        for row in session.claim("next"):
            if "pay" in row.state:
                return "replayed"
            record = {"pay": {"n": 1, "ok": "second"}}
            ack = session.checkpoint(row.id, row.lease_token, record)
            assert ack.answer == "done"
            return "paid"
        return None

    def check(run: Run) -> None:
        nothing_is_lost(run)
        task = state_of(run, run.memory["id"])
        written = "select exists (select from ledger where payment = %s)"
        ledger = run.session.scalar(written, run.memory["payment"])
        paid = task.state.get("pay", {}).get("ok")
        assert ledger == (paid == "first") == run.committed("first")
        assert (paid == "second") == (run.result("next", 0) == "paid")
        assert not (run.committed("first") and run.result("next", 0) == "paid")

    return Program(
        "checkpoint vs. sweep",
        (
            Actor("first", (business, fence), isolation, commits),
            Actor("sweeper", (sweep,), READ_COMMITTED, at=OUT),
            Actor("next", (next_owner,), at=OUT),
        ),
        running,
        check,
        may_fail,
    )


ENDS: dict[str, Step] = {
    "finish": lambda s, m: s.finish(m["id"], m["token"], "r"),
    "suspend": suspend,
    "release": lambda s, m: s.release(m["id"], m["token"]),
    "fail": lambda s, m: s.fail(m["id"], m["token"]),
    "fail for good": lambda s, m: s.fail(m["id"], m["token"], retryable=False),
}
UNTOUCHED = {
    "finish": "succeeded",
    "suspend": "waiting",
    "release": "pending",
    "fail": "pending",
    "fail for good": "failed",
}


def the_end_of_a_run_meets_a_cancel(
    isolation: str, commits: bool, end: str, compensations: int
) -> Program:
    """Decision 7: whoever comes second under the row's lock knows of the other; nothing forgotten."""

    def begin(session: Session) -> Memory:
        memory = running(session)
        record = {"done": {"n": 1, "ok": 1, "compensate": True}}
        session.checkpoint(memory["id"], memory["token"], record, compensations=[compensations])
        return memory

    def check(run: Run) -> None:
        nothing_is_lost(run)
        task = state_of(run, run.memory["id"])
        ended = run.committed("worker") and run.result("worker").answer == "done"
        said = run.result("caller", -1) if run.committed("caller") else None
        asked = said in ("requested", "canceled") or task.compensating == "canceled"
        assert (task.cancel_requested_at is not None) == asked
        if not ended:
            assert task.status == ("running" if said in (None, "requested") else "?")
        elif said is None:
            expected = UNTOUCHED[end]
            unwinds = expected == "failed" and compensations
            assert task.status == ("pending" if unwinds else expected)
        elif end in ("finish", "fail for good"):
            ends_as = UNTOUCHED[end]
            if ends_as == "failed" and compensations:
                assert (task.status, task.compensating) == ("pending", "failed")
            else:
                assert task.status == ends_as
            assert said in ("requested", "finished", "compensating")
        elif compensations:
            assert (task.status, task.compensating) == ("pending", "canceled")
            assert task.attempts == 0
        else:
            assert task.status == "canceled"
        assert run.outcomes["worker"].blocked == 0

    return Program(
        f"{end} vs. cancel",
        (
            caller(cancel, isolation, commits),
            Actor("worker", (ENDS[end],), READ_COMMITTED),
        ),
        begin,
        check,
        may_fail,
    )


def three_claims(commits: bool) -> Program:
    """H21, invariant 1: each task has one owner, nobody waits, nobody gets more than was asked."""

    def begin(session: Session) -> Memory:
        for key in "abc":
            session.enqueue(key)
        return {}

    def take_two(session: Session, memory: Memory) -> Any:
        return session.claim("two", 2)

    def check(run: Run) -> None:
        nothing_is_lost(run)
        taken = {name: run.result(name) for name in run.outcomes}
        rows = [row for name in taken if run.committed(name) for row in taken[name]]
        assert len({row.id for row in rows}) == len(rows)
        assert all(len(taken[name]) <= 2 for name in taken)
        assert all(run.session.task(row.id).lease_token == row.lease_token for row in rows)
        assert all(outcome.blocked == 0 for outcome in run.outcomes.values())
        alive = run.session.scalar("select count(*) from leasetask.task where status = 'running'")
        assert alive == len(rows)

    return Program(
        "claim vs. claim",
        (
            Actor("one", (take_two,), READ_COMMITTED, commits),
            Actor("two", (take_two,), READ_COMMITTED),
            Actor("three", (take_two,), READ_COMMITTED),
        ),
        begin,
        check,
    )


def a_claim_meets_a_cancel() -> Program:
    """H43: an open transaction on the head of one lane hides no task of another."""

    def begin(session: Session) -> Memory:
        id = session.enqueue("a", priority=0)
        return {"id": id, "other": session.enqueue("b", priority=1)}

    def check(run: Run) -> None:
        nothing_is_lost(run)
        (claimed,) = run.result("claimer")
        if run.order.index("claimer.") > run.order.index("caller"):
            assert str(claimed.id) == run.memory["other"]
        assert run.outcomes["claimer"].blocked == 0

    return Program(
        "cancel vs. claim",
        (Actor("caller", (cancel,), READ_COMMITTED), Actor("claimer", (claim,))),
        begin,
        check,
    )


def a_heartbeat_meets_the_sweep_and_the_prune(budget: str) -> Program:
    """H01, H05: a renewed or finished task is not swept, a swept one is not renewed or finished."""

    def begin(session: Session) -> Memory:
        session.finish(*session.run("old"))
        id, token = session.run("a", max_attempts=5 if budget == "left" else 1)
        return {"id": id, "token": token}

    def renew(session: Session, memory: Memory) -> Any:
        return session.heartbeat(memory["id"], memory["token"]).answer

    def finish(session: Session, memory: Memory) -> Any:
        return session.finish(memory["id"], memory["token"], "r").answer

    def prune(session: Session, memory: Memory) -> Any:
        return session.value("prune", age=0)

    def check(run: Run) -> None:
        nothing_is_lost(run)
        task = state_of(run, run.memory["id"])
        swept = run.committed("sweeper") and len(run.result("sweeper")) == 1
        finished = run.result("worker", 1) == "done"
        assert swept != finished
        assert task.status == (
            "succeeded" if finished else {"left": "pending", "spent": "dead"}[budget]
        )
        assert all(outcome.blocked == 0 for outcome in run.outcomes.values())

    return Program(
        "heartbeat vs. sweep vs. prune",
        (
            Actor("worker", (renew, finish), at=OUT),
            Actor("sweeper", (sweep,), READ_COMMITTED, at=OUT),
            Actor("pruner", (prune,), READ_COMMITTED, at=OUT),
        ),
        begin,
        check,
    )


def a_batch_of_heartbeats_meets_a_cancel(isolation: str, commits: bool) -> Program:
    """H43: the heartbeat of the others goes on; the held one is told to be `locked`."""

    def begin(session: Session) -> Memory:
        pairs = [session.run(key) for key in "abc"]
        return {"id": pairs[1][0], "ids": [p[0] for p in pairs], "tokens": [p[1] for p in pairs]}

    def renew(session: Session, memory: Memory) -> Any:
        return session.call("heartbeat", ids=memory["ids"], tokens=memory["tokens"], lease=LEASE)

    def check(run: Run) -> None:
        nothing_is_lost(run)
        for step in (0, 1):
            answers = [row.answer for row in run.result("worker", step)]
            assert answers in (["done"] * 3, ["done", "locked", "done"])
        if run.committed("caller") and run.order[-1] == "worker.":
            assert [row.cancel_requested for row in run.result("worker", 1)] == [False, True, False]
        assert run.outcomes["worker"].blocked == 0

    return Program(
        "heartbeat vs. cancel",
        (
            caller(cancel, isolation, commits),
            Actor("worker", (renew, renew), at=1),
        ),
        begin,
        check,
        may_fail,
    )


def two_sweeps() -> Program:
    """H01: nobody is swept twice or left, nobody waits, and both know how many the owner held."""

    def begin(session: Session) -> Memory:
        return {"ids": [session.run(key, max_attempts=1)[0] for key in "ab"]}

    def one(session: Session, memory: Memory) -> Any:
        return session.call("sweep", n=1)

    def check(run: Run) -> None:
        assert all(outcome.blocked == 0 for outcome in run.outcomes.values())
        run.session.at(OUT)
        swept = [row for name in ("first", "second") for row in run.result(name)]
        swept += run.session.call("sweep")
        assert sorted(str(row.id) for row in swept) == sorted(run.memory["ids"])
        assert {row.outcome for row in swept} == {"suspect"}
        nothing_is_lost(run)

    return Program(
        "sweep vs. sweep",
        (
            Actor("first", (one,), READ_COMMITTED, at=OUT),
            Actor("second", (one,), READ_COMMITTED, at=OUT),
            Actor("given up", (sweep,), READ_COMMITTED, commits=False, at=OUT),
        ),
        begin,
        check,
    )


# ═══ Producers and operators ═══════════════════════════════════════════════════════════════════


def two_producers_use_one_key(isolation: str, other: str, commits: bool, inputs: str) -> Program:
    """H44, invariant 7, decision 10: one task, known to both, and never no answer."""

    def enqueue(input: int) -> Step:
        return lambda session, memory: session.call(
            "try_enqueue", kind=KIND, key="order", input=input
        )

    def check(run: Run) -> None:
        nothing_is_lost(run)
        answers = {n: run.result(n, 1)[0] for n in run.outcomes if run.committed(n)}
        tasks = run.session.rows("select id, input from leasetask.task")
        assert len(tasks) == bool(answers)
        assert len({answer.id for answer in answers.values()}) <= 1
        assert sum(answer.outcome == "new" for answer in answers.values()) == bool(answers)
        second = "existing" if inputs == "equal" else "conflict"
        assert {answer.outcome for answer in answers.values()} <= {"new", second}
        if commits and isolation == READ_COMMITTED:
            assert len(answers) == 2

    return Program(
        "enqueue vs. enqueue",
        (
            Actor("one", (look, enqueue(1)), isolation, commits),
            Actor("two", (look, enqueue(1 if inputs == "equal" else 2)), other),
        ),
        lambda session: {},
        check,
        may_fail,
    )


def three_producers_of_many_keys(isolation: str) -> Program:
    """H44: many keys in two orders never deadlock, and each input has its answer."""

    def enqueue(*keys: str) -> Step:
        return lambda session, memory: session.call(
            "enqueue_many", kind=KIND, inputs=[0] * len(keys), keys=list(keys)
        )

    def check(run: Run) -> None:
        nothing_is_lost(run)
        for name in run.outcomes:
            if run.committed(name):
                assert sorted(row.ord for row in run.result(name)) == [1, 2, 3]
        assert run.session.scalar("select count(*) from leasetask.task") == 3

    return Program(
        "many vs. many",
        (
            Actor("one", (enqueue("a", "b", "c"),), isolation),
            Actor("two", (enqueue("c", "b", "a"),), isolation),
            Actor("three", (enqueue("b", "a", "c"),), isolation),
        ),
        lambda session: {},
        check,
        may_fail,
    )


def a_retry_meets_the_prune(isolation: str, commits: bool) -> Program:
    """Decision 13: the operator's retry gets the whole input, or an answer that says it is gone."""

    def begin(session: Session) -> Memory:
        id, token = session.run("a", input=7)
        session.checkpoint(id, token, {"s": {"n": 1, "ok": "x" * 3000}})
        session.fail(id, token, retryable=False)
        return {"id": id}

    def retry(session: Session, memory: Memory) -> None:
        session.call("retry", task=memory["id"])

    def check(run: Run) -> None:
        nothing_is_lost(run)
        task = state_of(run, run.memory["id"])
        retried = run.committed("operator")
        pruned = task.pruned_at is not None
        assert task.status == ("pending" if retried else "failed")
        assert (task.input, task.stored_steps) == ((None, 0) if pruned else (7, 1))
        assert not (retried and pruned)
        if run.outcomes["operator"].error == "LT003":
            assert pruned
        assert run.outcomes["pruner"].blocked == run.outcomes["later"].blocked == 0

    def prune(session: Session, memory: Memory) -> Any:
        return session.value("prune", age=0)

    return Program(
        "retry vs. prune",
        (
            Actor("operator", (look, retry), isolation, commits, at=1),
            Actor("pruner", (prune,), READ_COMMITTED, at=1),
            Actor("later", (prune,), at=1),
        ),
        begin,
        check,
        may_fail | {"LT003"},
    )


# ═══ Stopped inside the functions ══════════════════════════════════════════════════════════════
# One actor stops before every statement of the named functions, and with `rows` at each row that a
# statement looks at: its snapshot is taken and the row not yet locked. The others run in between.

DELIVERY = ("deliver_topic", "pair_topic")
SIGNAL_NOW = ("signal_now", "pair_topic")


def suspend_another(session: Session, memory: Memory) -> Any:
    return session.suspend(*memory["running"], **memory["how"])


BESIDE_A_DELIVERY: dict[str, tuple[Step, ...]] = {
    "a signal": (signal,),
    "a signal and its delivery, then a suspension": (
        in_turn(signal, deliver),
        suspend_another,
    ),
    "a suspension, then a signal": (suspend_another, signal),
    "a suspension and its delivery": (in_turn(suspend_another, deliver),),
    "a cancel of the older waiter": (cancel,),
    "a claim of the older waiter": (claim,),
    "another delivery": (deliver,),
    "another delivery and a signal": (deliver, signal),
    "a latch, delivered, then a suspension": (
        in_turn(lambda s, m: s.signal("t", 1, sticky=True), deliver),
        suspend_another,
    ),
    "a prune": (lambda s, m: s.value("prune", age=0, signal_age=0),),
}


def a_delivery_is_stopped(
    beside: str,
    signals: int,
    waiters: int,
    *,
    mode: str = "signal",
    rows: bool = False,
    stopped: tuple[Step, tuple[str, ...]] = (deliver, DELIVERY),
) -> Program:
    """H28, decision 6: nothing that commits inside a delivery is slept over afterwards.

    `stopped`: what delivers, and the functions in which it stops.
    """
    step, gates = stopped

    def begin(session: Session) -> Memory:
        memory: Memory = {"how": {}}
        if mode == "hurry":
            snapshot = session.scalar("select pg_current_snapshot()::text")
            memory["how"] = {"mode": "hurry", "seq": None, "snapshot": snapshot}
        if waiters:
            memory |= two_waiters(session, **memory["how"])
        memory["running"] = session.run("c")
        for _ in range(signals):
            session.signal()
        if beside == "a prune":
            session.deliver_all()
        return memory

    return Program(
        f"deliver beside {beside}",
        (
            Actor("deliverer", (step,), at=10, gates=gates, rows=rows),
            Actor("beside", BESIDE_A_DELIVERY[beside], at=10),
        ),
        begin,
        nothing_is_lost,
    )


def a_delivery_meets_a_waiter_that_moves_on() -> Program:
    """H02, decision 6: a signal of one topic never becomes the result of a wait on another."""

    def move_on(session: Session, memory: Memory) -> None:
        for row in session.claim("other"):
            session.suspend(row.id, row.lease_token, "elsewhere", name="second", seq=2)

    def check(run: Run) -> None:
        nothing_is_lost(run)
        assert "second" not in run.session.task(run.memory["id"]).state

    return Program(
        "deliver vs. a waiter that moves on",
        (
            Actor("deliverer", (deliver,), at=10, gates=DELIVERY, rows=True),
            Actor("other", (move_on,), at=10),
        ),
        two_waiters_and_a_signal,
        check,
    )


HOLDER_CALLS: dict[str, Step] = {
    "checkpoint": lambda s, m: s.checkpoint(m["id"], m["token"], {"s": {"n": 1, "ok": "mine"}}),
    "large checkpoint": lambda s, m: s.checkpoint(
        m["id"], m["token"], {"s": {"n": 1, "ok": "mine" + "x" * 3000}}
    ),
    "note": lambda s, m: s.note(m["id"], m["token"], {"s": {"started": 1}}),
    "heartbeat": lambda s, m: s.heartbeat(m["id"], m["token"]),
    "abandon": lambda s, m: s.call("abandon", ids=[m["id"]], tokens=[m["token"]], seconds=5)[0],
    **ENDS,
}
HOLDER_GATES = (
    "take", "checkpoint", "note", "heartbeat", "abandon", "finish", "suspend", "release", "fail",
    "end_or_compensate", "cancel_taken",
)  # fmt: skip


def the_holder_is_stopped_while_it_is_swept(call: str) -> Program:
    """H01, H02, H04, invariant 1: the next owner is never written over, whenever the first wakes."""

    def sweep_and_claim(session: Session, memory: Memory) -> Any:
        swept = session.call("sweep")
        return swept, session.claim("next")

    def check(run: Run) -> None:
        nothing_is_lost(run)
        task = state_of(run, run.memory["id"])
        answer = run.result("holder").answer
        swept, claimed = run.result("next")
        assert answer in ("done", "lost")
        if claimed:
            (row,) = claimed
            assert (task.status, task.lease_token) == ("running", row.lease_token)
            assert task.state == row.state
            assert task.open_steps == row.open_steps
        if swept:
            assert answer == "lost" or run.order[0] != "next."
        if answer == "lost":
            assert "s" not in task.state
            assert "s" not in task.open_steps
            assert task.stored_steps == 0

    return Program(
        f"{call} vs. sweep",
        (
            Actor("holder", (HOLDER_CALLS[call],), gates=HOLDER_GATES, rows=True),
            Actor("next", (sweep_and_claim,), at=OUT),
        ),
        running,
        check,
    )


def the_sweep_is_stopped_while_the_holder_returns(call: str, budget: str) -> Program:
    """H01, H04, H05: what the holder wrote in time stands; the sweep looks again under the lock."""

    def begin(session: Session) -> Memory:
        id, token = session.run("a", max_attempts=5 if budget == "left" else 1)
        return {"id": id, "token": token}

    def check(run: Run) -> None:
        nothing_is_lost(run)
        task = state_of(run, run.memory["id"])
        answer = run.result("holder").answer
        swept = run.result("sweeper")
        if call == "abandon":
            assert answer == "done" or swept
        else:
            assert (answer == "done") == (not swept)
        if answer == "done" and call in ENDS:
            spent = call == "fail" and budget == "spent"
            assert task.status == ("failed" if spent else UNTOUCHED[call])
        if swept:
            assert task.status == ("pending" if budget == "left" else "dead")

    return Program(
        f"sweep vs. {call}",
        (
            Actor("holder", (HOLDER_CALLS[call],), at=OUT),
            Actor("sweeper", (sweep,), at=OUT, gates=("sweep_lease",), rows=True),
        ),
        begin,
        check,
    )


BESIDE_A_CLAIM: dict[str, Step] = {
    "another claim": claim,
    "a cancel": cancel,
    "a delivery": in_turn(signal, deliver),
    "a sweep of deadlines": sweep,
}


def a_claim_is_stopped(beside: str) -> Program:
    """H18, H21: a waiter taken by time is taken as it then is: once, and with one result."""

    def begin(session: Session) -> Memory:
        id = session.wait("a", seconds=5)
        session.deliver_all()
        session.do("update leasetask.task set deadline = leasetask.clock() + interval '9 s'")
        return {"id": id}

    def check(run: Run) -> None:
        nothing_is_lost(run)
        task = state_of(run, run.memory["id"])
        for row in run.result("claimer"):
            assert str(row.id) == run.memory["id"]
            assert task.lease_token == row.lease_token
            assert task.state == row.state
            assert row.runs == 2
        assert (task.status == "running") == bool(
            run.result("claimer") or (beside == "another claim" and run.result("beside"))
        )

    return Program(
        f"claim beside {beside}",
        (
            Actor("claimer", (claim,), at=8, gates=("claim",), rows=True),
            Actor(
                "beside",
                (BESIDE_A_CLAIM[beside],),
                at=10 if beside == "a sweep of deadlines" else 8,
            ),
        ),
        begin,
        check,
    )


def a_cancel_is_stopped(end: str) -> Program:
    """Decision 7: whatever becomes of the task meanwhile, a cancel is never forgotten."""

    def check(run: Run) -> None:
        nothing_is_lost(run)
        task = state_of(run, run.memory["id"])
        said = run.result("caller")
        if said == "requested":
            assert task.cancel_requested_at is not None
        else:
            assert (said, task.status) in (("canceled", "canceled"), ("finished", "succeeded"))

    return Program(
        f"cancel beside {end}",
        (
            Actor("caller", (cancel,), gates=("cancel", "end_or_compensate"), rows=True),
            Actor("worker", (ENDS[end], claim)),
        ),
        running,
        check,
    )


BESIDE_AN_ENQUEUE: dict[str, Step] = {
    "the same key": lambda s, m: s.enqueue("order", 1),
    "a prune that forgets keys": lambda s, m: s.value("prune", age=0, forget_keys=True),
    "a prune": lambda s, m: s.value("prune", age=0),
}


def an_enqueue_is_stopped(beside: str, before: str) -> Program:
    """Decision 10: idempotency has no window; there is always an answer, and the task it names."""

    def begin(session: Session) -> Memory:
        if before == "finished":
            session.finish(*session.run("order", input=1))
        return {}

    def check(run: Run) -> None:
        nothing_is_lost(run)
        assert len(run.result("producer")) == 1
        answer = run.result("producer")[0]
        assert answer.outcome in ("new", "existing")
        tasks = run.session.rows("select id, pruned_at from leasetask.task")
        forgotten = answer.outcome == "existing" and "forgets" in beside and not tasks
        assert forgotten or [task.id for task in tasks] == [answer.id]

    return Program(
        f"enqueue beside {beside}",
        (
            Actor(
                "producer",
                (lambda s, m: s.call("try_enqueue", kind=KIND, key="order", input=1),),
                at=1,
                gates=("try_enqueue", "enqueue_many"),
            ),
            Actor("beside", (BESIDE_AN_ENQUEUE[beside],), at=1),
        ),
        begin,
        check,
    )


def a_prune_meets_a_retry(stopped: str) -> Program:
    """Invariant 5: a task that runs again is not emptied."""

    def begin(session: Session) -> Memory:
        id, token = session.run("a", input=7)
        session.fail(id, token, retryable=False)
        return {"id": id}

    def retry(session: Session, memory: Memory) -> None:
        session.call("retry", task=memory["id"])

    def check(run: Run) -> None:
        nothing_is_lost(run)
        task = state_of(run, run.memory["id"])
        retried = run.committed("operator")
        assert (task.status, task.input) == (("pending", 7) if retried else ("failed", None))

    def prune(session: Session, memory: Memory) -> Any:
        return session.value("prune", age=0)

    def actor(name: str, call: str, step: Step) -> Actor:
        stops = call == stopped
        return Actor(name, (step,), at=1, gates=(call,) if stops else (), rows=stops)

    return Program(
        f"prune vs. retry, inside {stopped}",
        (actor("pruner", "prune", prune), actor("operator", "retry", retry)),
        begin,
        check,
        frozenset({"LT003"}),
    )
