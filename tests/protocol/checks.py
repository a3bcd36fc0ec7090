"""Rules of the protocol, each shown by one short story told by a single session.

Used by the hard cases, and by the mutants: a rule whose check has never failed is not proved.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import invariants
import psycopg
from calls import KIND, LEASE, START, Session

Check = Callable[[Session], None]

OUT = LEASE + 1
"""A time at which leases that began at 0 are out."""


def refused(sqlstate: str, call: Callable[[], Any]) -> None:
    """Make the call, which must raise this SQLSTATE."""
    try:
        call()
    except psycopg.Error as error:
        assert error.sqlstate == sqlstate, error
    else:
        raise AssertionError(f"not refused with {sqlstate}")


def row_of(session: Session, id: str) -> dict[str, Any]:
    return dict(session.task(id)._asdict())


# --- leases and tokens --------------------------------------------------------------------------


def every_call_of_a_holder(
    session: Session, id: str, token: str | None
) -> list[tuple[str, Callable[[], Any]]]:
    """Give each function that carries a token, by name, as a call for one task."""
    return [
        ("heartbeat", lambda: session.heartbeat(id, token)),
        ("checkpoint", lambda: session.checkpoint(id, token, {"s": {"n": 9, "ok": "stale"}})),
        ("note", lambda: session.note(id, token, {"s": {"started": 9}})),
        ("abandon", lambda: session.call("abandon", ids=[id], tokens=[token], seconds=1)[0]),
        ("release", lambda: session.release(id, token)),
        ("suspend", lambda: session.suspend(id, token)),
        ("fail", lambda: session.fail(id, token)),
        ("fail for good", lambda: session.fail(id, token, retryable=False)),
        ("finish", lambda: session.finish(id, token, "stale")),
    ]


def a_stale_token_is_refused(session: Session) -> None:
    """H02: whatever the first owner says after the sweep, the second one's row does not change."""
    id, stale = session.run("a", owner="first")
    session.signal()
    session.at(OUT)
    assert [row.outcome for row in session.call("sweep")] == ["recovered"]
    (claimed,) = session.claim("second")
    assert str(claimed.lease_token) != stale
    before = row_of(session, id)
    for name, call in every_call_of_a_holder(session, id, stale):
        assert call().answer == "lost", name
    session.deliver_all()
    assert row_of(session, id) == before
    assert session.scalar("select consumed_by from leasetask.task_signal") is None
    assert session.finish(id, str(claimed.lease_token)).answer == "done"


def a_fenced_child_is_not_there_if_the_lease_is_lost(session: Session) -> None:
    """H02: a stale owner's child task is enqueued in the transaction of a refused checkpoint."""
    id, stale = session.run("a", owner="first")
    session.at(OUT)
    session.call("sweep")
    with session.conn.transaction(force_rollback=True):
        session.enqueue("child")
        assert session.checkpoint(id, stale, {"child": {"n": 1, "ok": 1}}).answer == "lost"
    assert session.scalar("select count(*) from leasetask.task") == 1


def no_token_holds_nothing(session: Session) -> None:
    """Decision 8: a null token is nobody's, whatever state the task is in."""
    ended, token = session.run("ended")
    session.finish(ended, token, "r")
    running, _ = session.run("running")
    waiting = session.wait("waiting")
    pending = session.enqueue("pending")
    for id in (pending, running, waiting, ended):
        before = row_of(session, id)
        for name, call in every_call_of_a_holder(session, id, None):
            assert call().answer == "lost", name
        assert row_of(session, id) == before


def tokens_are_new_at_every_claim(session: Session) -> None:
    """H03: claim, suspend, claim again: the same attempt, another token."""
    id, first = session.run("a")
    assert session.suspend(id, first, seconds=5).answer == "done"
    session.at(6)
    (second,) = session.claim()
    before = row_of(session, id)
    assert (second.attempts, second.runs) == (1, 2)
    for name in ("heartbeat", "checkpoint", "note"):
        call = dict(every_call_of_a_holder(session, id, first))[name]
        assert call().answer == "lost", name
    assert row_of(session, id) == before


def a_repeated_end_hears_done(session: Session) -> None:
    """H37: a worker that repeats its end, the answer being lost, hears `done`; nothing is written."""
    ends: list[Callable[[str, str], Any]] = [
        lambda id, token: session.finish(id, token, "r"),
        session.suspend,
        session.release,
        session.fail,
        lambda id, token: session.fail(id, token, retryable=False),
    ]
    for number, end in enumerate(ends):
        session.clear()
        id, token = session.run(str(number))
        assert end(id, token).answer == "done"
        before = row_of(session, id)
        assert end(id, token).answer == "done"
        assert row_of(session, id) == before


def a_swept_worker_does_not_hear_done(session: Session) -> None:
    """A lease that the sweep ended leaves no token behind: its worker hears `lost`."""
    id, token = session.run("a", max_attempts=1)
    session.at(OUT)
    assert [row.outcome for row in session.call("sweep")] == ["dead"]
    assert session.finish(id, token).answer == "lost"


# --- steps --------------------------------------------------------------------------------------


def a_recorded_step_never_changes(session: Session) -> None:
    """Invariant 2: `already` answers what is recorded, in the row or outside it; nothing changes."""
    for size in (1, 3000):
        session.clear()
        id, token = session.run("a")
        record = {"n": 1, "ok": "x" * size}
        assert session.checkpoint(id, token, {"s": record}).answer == "done"
        before = row_of(session, id)
        both = {"s": {"n": 1, "ok": "other"}, "t": {"n": 2, "ok": 2}}
        again = session.checkpoint(id, token, both)
        assert (again.answer, again.recorded) == ("already", {"s": record})
        assert row_of(session, id) == before
        assert session.value("recorded_steps", task=id) == {"s": record}


def a_batch_holds_one_item_per_task(session: Session) -> None:
    """Decision 9: two results of one task in one batch are refused, never silently halved."""
    id, token = session.run("a")
    patches = [{"s": {"n": 1, "ok": 1}}, {"t": {"n": 2, "ok": 2}}]
    refused(
        "LT004",
        lambda: session.call(
            "checkpoint", ids=[id, id], tokens=[token, token], patches=patches, lease=LEASE
        ),
    )


def state_stays_small(session: Session) -> None:
    """Section 8: step 500 costs what step 5 costs: the row holds less than 2 kB of records."""
    id, token = session.run("a")
    for n in range(1, 61):
        record = {"n": n, "ok": "x" * 100}
        assert session.checkpoint(id, token, {f"s{n}": record}).answer == "done"
        assert session.scalar("select pg_column_size(state) from leasetask.task") <= 2000
    assert len(session.value("recorded_steps", task=id)) == 60
    invariants.check(session)


# --- attempts -----------------------------------------------------------------------------------


def a_suspension_spends_no_attempt(session: Session) -> None:
    """H14: forty waits of a task with max_attempts=3."""
    id = session.enqueue("a", max_attempts=3)
    for n in range(40):
        session.at(n * 10)
        (row,) = session.claim()
        assert row.attempts == 1
        ack = session.suspend(id, str(row.lease_token), name=f"w{n}", seq=n + 1, seconds=5)
        assert ack.answer == "done"


def a_task_that_dies_alone_is_charged(session: Session) -> None:
    """H12: it ends dead after exactly max_attempts runs."""
    id = session.enqueue("a", max_attempts=3)
    for n in range(3):
        session.at(n * 100)
        assert len(session.claim(f"owner {n}")) == 1
        session.at(n * 100 + OUT)
        expected = "recovered" if n < 2 else "dead"
        assert [row.outcome for row in session.call("sweep")] == [expected]
    assert session.task(id).status == "dead"


def a_crash_takes_no_bystander_with_it(session: Session) -> None:
    """Decision 3, H12: what died with others is never charged to death; then it runs alone."""
    ids = [session.run(key, max_attempts=1, owner="crashed")[0] for key in "abc"]
    session.at(OUT)
    swept = [row for _ in ids for row in session.call("sweep", n=1)]
    assert sorted(str(row.id) for row in swept) == sorted(ids)
    assert [row.outcome for row in swept] == ["suspect"] * 3
    assert session.claim("ordinary", 3) == []
    (alone,) = session.claim("child", 1, suspects=True)
    session.at(2 * OUT)
    assert [row.outcome for row in session.call("sweep")] == ["dead"]
    assert session.task(str(alone.id)).status == "dead"


def an_owner_found_with_fewer_was_not_alone(session: Session) -> None:
    """Decision 3: of three leases two ended before the last ran out: its owner was not alone."""
    session.run("a", max_attempts=1, owner="crashed")
    session.at(1)
    session.run("b", max_attempts=1, owner="crashed")
    session.at(OUT)
    assert len(session.call("sweep")) == 1
    session.at(OUT + 1)
    assert [row.outcome for row in session.call("sweep")] == ["suspect"]


def an_abandoned_task_is_neither_charged_nor_suspected(session: Session) -> None:
    """H15: left in a thread at shutdown: due again, with its whole budget, its token good till then."""
    id, token = session.run("a", max_attempts=1)
    other, other_token = session.run("b", max_attempts=1)
    session.call("abandon", ids=[id, other], tokens=[token, other_token], seconds=5)
    assert session.heartbeat(id, token).answer == "done"
    assert session.release(other, other_token).status == "pending"
    session.at(6)
    assert [row.outcome for row in session.call("sweep")] == ["recovered"]
    for task in (session.task(id), session.task(other)):
        assert (task.status, task.attempts, task.suspect) == ("pending", 0, False)


def a_failure_after_an_abandon_is_charged(session: Session) -> None:
    """H14: the body ended in time after all, and raised: that was a try."""
    id, token = session.run("a", max_attempts=1)
    session.call("abandon", ids=[id], tokens=[token], seconds=5)
    assert session.fail(id, token).status == "failed"


# --- sweep --------------------------------------------------------------------------------------


def a_row_that_cannot_be_recovered_stops_nothing(session: Session) -> None:
    """H11: more expired rows than a batch, the first of them not recoverable."""
    session.do(
        "create or replace function pg_temp.refuse() returns trigger language plpgsql as $$"
        " begin if old.idempotency_key < 'bad9' then raise 'never'; end if; return new; end $$"
    )
    ids = [session.run(key, owner="crashed")[0] for key in ("bad1", "bad2", "bad3", *"cdefg")]
    session.do(
        "create trigger refuse before update on leasetask.task"
        " for each row execute function pg_temp.refuse()"
    )
    try:
        session.at(OUT)
        recovered: set[str] = set()
        for _ in range(4):
            rows = session.call("sweep", n=2)
            assert {str(r.id) for r in rows if r.outcome == "error"} <= set(ids[:3])
            done = {str(r.id) for r in rows if r.outcome != "error"}
            assert len(done) <= 2
            recovered |= done
        assert recovered == set(ids[3:])
    finally:
        session.do("drop trigger refuse on leasetask.task")


def what_is_past_its_deadline_fails(session: Session) -> None:
    """Decision 4: pending or waiting, of whatever kind; a running one at its next suspension."""
    pending = session.enqueue("p", deadline=10)
    other = session.enqueue("o", kind="nobody runs this", deadline=10)
    held, token = session.run("w", deadline=10)
    waiting, waiting_token = session.run("v", deadline=10)
    assert session.suspend(waiting, waiting_token).answer == "done"
    session.at(11)
    swept = {str(row.id): row.outcome for row in session.call("sweep")}
    assert swept == dict.fromkeys((pending, other, waiting), "expired")
    assert session.task(held).status == "running"
    session.suspend(held, token)
    assert session.claim() == []
    assert [row.outcome for row in session.call("sweep")] == ["expired"]
    assert session.task(held).last_error["type"] == "DeadlineExceeded"


# --- signals ------------------------------------------------------------------------------------


def a_latch_serves_everyone(session: Session) -> None:
    """Decision 6: whoever waits on the topic, now or later, sees the newest, until it is cleared."""
    early = session.wait("early")
    session.signal("t", "old", sticky=True)
    session.signal("t", "new", sticky=True)
    session.deliver_all()
    late = session.wait("late")
    session.deliver_all()
    for id in (early, late):
        assert session.task(id).state.get("wait", {}).get("ok") == "new"
    assert session.value("clear_signal", topic="t") is True
    after = session.wait("after")
    session.deliver_all()
    assert session.task(after).wait_mode == "signal"


def the_longest_waiter_is_served_first(session: Session) -> None:
    """Issue 3: one signal each, in the order in which they began to wait."""
    waiters = []
    for n, key in enumerate("cab"):
        session.at(n)
        waiters.append(session.wait(key))
    for n, waiter in enumerate(waiters):
        session.signal("t", n)
        session.deliver_all()
        assert session.task(waiter).state.get("wait", {}).get("ok") == n
        assert session.task(waiter).next_run_at == START + timedelta(seconds=2)
        assert all("wait" not in session.task(later).state for later in waiters[n + 1 :])


def a_timeout_replays_as_a_timeout(session: Session) -> None:
    """H18: it timed out, the process died, then the signal came: the same branch again."""
    id = session.wait("a", seconds=5)
    session.at(6)
    (row,) = session.claim("first")
    timed_out = {"wait": {"n": 1, "timeout": True}}
    assert row.state == timed_out
    session.at(6 + OUT)
    assert len(session.call("sweep")) == 1
    session.signal()
    session.deliver_all()
    (replay,) = session.claim("second")
    assert (str(replay.id), replay.state) == (id, timed_out)
    session.suspend(id, str(replay.lease_token), name="next", seq=2)
    session.deliver_all()
    assert session.task(id).state["next"]["signal"] is not None


def a_signal_wakes_with_its_own_commit(session: Session) -> None:
    """H28: outside a transaction it is given out at once, and looked at once more afterwards."""
    id = session.wait("a")
    session.deliver_all()
    (sent,) = session.call("signal_now", topic="t", payload=7)
    assert sent.woken == 1
    assert session.task(id).state["wait"]["ok"] == 7
    assert session.task(id).state["wait"]["signal"] == sent.id
    assert list(session.call("undelivered_topics")[0]) == ["t"]
    session.deliver_all()
    assert session.call("undelivered_topics") == []
    early = session.run("b")
    (sent,) = session.call("signal_now", topic="u", payload=8)
    assert sent.woken == 0
    session.suspend(*early, "u")
    session.deliver_all()
    assert session.task(early[0]).state["wait"]["ok"] == 8


def the_dead_leave_their_marks(session: Session) -> None:
    """H28: whoever dies between a commit and its delivery leaves it to the next worker's poll."""
    id = session.wait("a")
    session.deliver_all()
    session.signal()
    assert list(session.call("undelivered_topics")[0]) == ["t"]
    session.deliver_all()
    assert "ok" in session.task(id).state["wait"]
    early = session.run("b")
    session.signal("u")
    session.deliver_all()
    session.suspend(*early, "u")
    session.deliver_all()
    assert "ok" in session.task(early[0]).state["wait"]


def a_full_round_leaves_the_rest_to_the_next(session: Session) -> None:
    """Decision 6: a hundred at most in a round; whoever dies after it, the rest is not forgotten."""
    session.call("enqueue_many", kind=KIND, inputs=[0] * 120)
    rows = session.claim("w", 120)
    snapshot = session.scalar("select pg_current_snapshot()::text")
    session.call(
        "suspend",
        ids=[row.id for row in rows],
        tokens=[row.lease_token for row in rows],
        modes=["signal"] + ["hurry"] * 119,
        names=["wait"] * 120,
        seqs=[1] + [None] * 119,
        topics=["t"] * 120,
        seconds=[None] * 120,
        untils=[None] * 120,
        snapshots=[None] + [snapshot] * 119,
    )
    session.deliver_all()
    session.signal()
    (first,) = session.deliver()
    assert first.again is True
    assert 0 < first.woken < 120
    invariants.check_delivered(session)
    assert session.scalar("select count(*) from leasetask.task where wait_mode is null") == 120


def an_early_signal_does_not_hurry(session: Session) -> None:
    """Decision 6: what a check could see already, sticky or not, does not make it spin."""
    session.signal()
    session.signal(sticky=True)
    snapshot = session.scalar("select pg_current_snapshot()::text")
    id = session.wait("a", mode="hurry", seq=None, snapshot=snapshot, seconds=60)
    session.deliver_all()
    assert session.claim() == []
    session.signal()
    session.deliver_all()
    (row,) = session.claim()
    assert (str(row.id), row.state) == (id, {})


# --- cancel and compensation --------------------------------------------------------------------


def compensated(session: Session, **more: Any) -> tuple[str, str]:
    """Start a task that has registered a compensation."""
    id, token = session.run("a", **more)
    record = {"made": {"n": 1, "ok": 1, "compensate": True}}
    session.checkpoint(id, token, record, compensations=[1])
    return id, token


def a_cancel_unwinds_what_is_registered(session: Session) -> None:
    """Decision 7: with compensations the task becomes due, and ends as decided once they have run."""
    id, token = compensated(session)
    assert session.cancel(id) == "requested"
    assert session.heartbeat(id, token).cancel_requested is True
    assert session.suspend(id, token).status == "pending"
    assert session.cancel(id) == "compensating"
    (row,) = session.claim()
    assert (row.compensating, row.attempts) == ("canceled", 1)
    assert session.finish(id, str(row.lease_token)).status == "canceled"
    assert session.cancel(id) == "finished"


def a_spent_budget_compensates_before_the_end(session: Session) -> None:
    """Decision 7: a swept task without budget is given back once, attempts 0, and ends dead."""
    id, _ = compensated(session, max_attempts=1)
    session.at(OUT)
    assert [row.outcome for row in session.call("sweep")] == ["compensating"]
    task = session.task(id)
    assert (task.status, task.attempts, task.compensating) == ("pending", 0, "dead")
    (row,) = session.claim()
    assert session.finish(id, str(row.lease_token)).status == "dead"
    assert session.task(id).dead_letter_at is not None


def a_compensation_that_fails_ends_failed(session: Session) -> None:
    """Decision 7: and the cause of the unwinding is what the row tells."""
    id, _ = compensated(session)
    session.at(OUT)
    session.cancel(id)
    assert [row.outcome for row in session.call("sweep")] == ["compensating"]
    (row,) = session.claim()
    assert session.fail(id, str(row.lease_token), retryable=False).status == "failed"


# --- enqueue, retry, prune ----------------------------------------------------------------------


def a_key_names_one_input(session: Session) -> None:
    """Invariant 7: equal JSON is equal in any order, before and after the prune; other is refused."""
    id = session.enqueue("key", {"a": 1, "b": [1.0, 2]})
    session.cancel(id)
    session.at(10)
    for age in (None, 0):
        if age is not None:
            assert session.value("prune", age=age) == 1
            assert session.task(id).input is None
        for input, outcome in (
            ({"b": [1, 2.0], "a": 1}, "existing"),
            ({"a": 1, "b": [2, 1]}, "conflict"),
        ):
            (answer,) = session.call("try_enqueue", kind=KIND, key="key", input=input)
            assert (str(answer.id), answer.outcome) == (id, outcome)
        refused("LT001", lambda: session.call("enqueue", kind=KIND, key="key", input=0))


def many_are_answered_in_their_order(session: Session) -> None:
    """Decision 10: one row of outcome for each input, doubles and conflicts among them."""
    session.enqueue("b", 2)
    rows = session.call(
        "enqueue_many", kind=KIND, inputs=[1, 2, 3, 1, 9], keys=["a", "b", "b", "a", None]
    )
    outcomes = [(r.outcome, r.stored_input) for r in sorted(rows, key=lambda r: r.ord)]
    assert outcomes == [
        ("new", None), ("existing", None), ("conflict", 2), ("existing", None), ("new", None),
    ]  # fmt: skip


def a_retry_drops_the_failure_and_what_came_after(session: Session) -> None:
    """Decision 13: the rest is kept, the budget is whole, the deadline starts anew, each time."""
    id, token = session.run("a", max_attempts=2, deadline=1000)
    for n, big in ((1, 0), (2, 3000), (3, 0), (4, 3000)):
        session.checkpoint(id, token, {f"s{n}": {"n": n, "ok": "x" * big}})
    error = {"type": "StepFailed", "n": 3}
    session.call("fail", ids=[id], tokens=[token], errors=[error], retryable=[False])
    for hours in (10, 20):
        session.at(hours * 3600)
        session.call("retry", task=id)
        task = session.task(id)
        assert (task.status, task.attempts, task.stored_steps) == ("pending", 0, 1)
        assert sorted(session.value("recorded_steps", task=id)) == ["s1", "s2"]
        assert task.deadline == START + timedelta(hours=hours, seconds=1000)
        (row,) = session.claim()
        session.fail(id, str(row.lease_token), retryable=False)
    refused("LT002", lambda: session.call("retry", task="0" * 32))


def the_time_zone_changes_nothing(session: Session) -> None:
    """H42: the same story across a change of the clocks, in four sessions' time zones."""
    told = set()
    for zone in ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"):
        session.clear()
        session.do(f"set timezone = '{zone}'")
        before = 88 * 86400 - 3600 * 12  # on 30 March 2030, hours before the clocks change
        session.at(before)
        day = 86400
        id, token = session.run("a", deadline=2 * day)
        session.enqueue("later", delay=2 * day)
        session.suspend(id, token, seconds=day)
        times = session.rows(
            "select extract(epoch from next_run_at)::float8 as due,"
            " extract(epoch from deadline)::float8 as deadline from leasetask.task order by idempotency_key"
        )
        session.signal("forgotten")
        session.finish(*session.run("done"))
        session.at(before + 3 * day)
        session.call("sweep")
        session.call("retry", task=id)
        deadline = "select extract(epoch from deadline)::float8 from leasetask.task where id = %s"
        session.at(before + 30 * day - 1)
        kept = session.call("prune")[0][0]
        session.at(before + 30 * day + 1)
        told.add((tuple(times), session.scalar(deadline, id), kept, session.call("prune")[0][0]))
    session.do("reset timezone")
    assert len(told) == 1, told


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        a_stale_token_is_refused,
        a_fenced_child_is_not_there_if_the_lease_is_lost,
        no_token_holds_nothing,
        tokens_are_new_at_every_claim,
        a_repeated_end_hears_done,
        a_swept_worker_does_not_hear_done,
        a_recorded_step_never_changes,
        a_batch_holds_one_item_per_task,
        state_stays_small,
        a_suspension_spends_no_attempt,
        a_task_that_dies_alone_is_charged,
        a_crash_takes_no_bystander_with_it,
        an_owner_found_with_fewer_was_not_alone,
        an_abandoned_task_is_neither_charged_nor_suspected,
        a_failure_after_an_abandon_is_charged,
        a_row_that_cannot_be_recovered_stops_nothing,
        what_is_past_its_deadline_fails,
        a_latch_serves_everyone,
        the_longest_waiter_is_served_first,
        a_timeout_replays_as_a_timeout,
        a_signal_wakes_with_its_own_commit,
        the_dead_leave_their_marks,
        a_full_round_leaves_the_rest_to_the_next,
        an_early_signal_does_not_hurry,
        a_cancel_unwinds_what_is_registered,
        a_spent_budget_compensates_before_the_end,
        a_compensation_that_fails_ends_failed,
        a_key_names_one_input,
        many_are_answered_in_their_order,
        a_retry_drops_the_failure_and_what_came_after,
        the_time_zone_changes_nothing,
    )
}
