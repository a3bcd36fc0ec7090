"""Workers that die, freeze or are busy past their lease: real processes, counted in a file."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from conftest import SOAK
from support import (
    Fleet,
    WorkerProcess,
    column,
    enqueue,
    pass_time,
    statuses,
    wait_for_end,
    wait_for_status,
    wait_until,
)

from leasetask import App, Context, LeaseTaskError, Retry
from leasetask.claimer import Claimer
from leasetask.model import Claimed
from leasetask.worker import WorkerOptions

Db = psycopg.Connection[Any]
LEASE = 1.0


@pytest.fixture
def fleet(dsn: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(dsn, tmp_path) as fleet:
        yield fleet


def lease_is_out(db: Db, task_id: str) -> bool:
    return bool(column(db, "lease_until < clock_timestamp()", task_id))


# --- SIGKILL -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["five", "five_async"])
def test_h17_a_task_goes_on_at_step_4_after_kill_9(db: Db, fleet: Fleet, kind: str) -> None:
    """H17, must show (a): another worker is at step 4 within lease + 2 s; each step ran once."""
    task = enqueue(db, kind)
    first = fleet.start("recovery", lease=LEASE)
    fleet.ledger.wait_for("stands after step 3")
    fleet.start("recovery", lease=LEASE)
    killed_at = time.monotonic()
    first.kill()
    resumed = fleet.ledger.wait_for("step 4")
    assert resumed.at - killed_at < LEASE + 2
    assert resumed.pid != first.pid
    wait_for_status(db, task, "succeeded")
    assert [fleet.ledger.count(f"step {n}") for n in (1, 2, 3, 4, 5)] == [1] * 5
    assert column(db, "result", task) == 15
    assert column(db, "runs", task) == 2


def test_h09_no_two_workers_have_one_name(dsn: str) -> None:
    """H09: also in one process, where host and pid are the same."""
    app = App(dsn)
    owners = {app.worker(WorkerOptions()).owner for _ in range(100)}
    assert len(owners) == 100


def test_h10_a_fleet_sweeps_for_another(db: Db, fleet: Fleet) -> None:
    """H10: a worker that cannot run a kind recovers its tasks for those that can.

    H09: the same command started again on the same host is somebody else: it neither adopts nor
    renews what the killed one held, whose lease runs out and names its owner.
    """
    task = enqueue(db, "five")
    first = fleet.start("recovery", lease=LEASE)
    fleet.ledger.wait_for("stands after step 3")
    owner = column(db, "lease_owner", task)
    fleet.start("noop", lease=LEASE)
    first.kill()
    wait_for_status(db, task, "pending")
    assert column(db, "attempts", task) == 1
    error = column(db, "last_error", task)
    assert (error["type"], owner in error["message"]) == ("LeaseExpired", True)
    again = fleet.start("recovery", lease=LEASE)
    wait_for_status(db, task, "succeeded")
    assert fleet.ledger.entries("step 5")[0].pid == again.pid
    assert column(db, "runs", task) == 2


# --- a handler that kills its worker -------------------------------------------------------------


@pytest.mark.parametrize("max_attempts", [1, 3] if not SOAK else [1, 2, 3, 5])
def test_h12_a_killer_dies_alone(db: Db, fleet: Fleet, max_attempts: int) -> None:
    """H12: a handler that kills its process ends dead after at most max_attempts + 2 runs.

    The forty-nine claimed with it succeed, whatever budget they have; the test restarts the worker
    whenever it dies.
    """
    with db.transaction():
        healthy = [enqueue(db, "bystander", f"{n}", max_attempts=max_attempts) for n in range(24)]
        killer = enqueue(db, "killer", max_attempts=max_attempts)
        healthy += [
            enqueue(db, "bystander", f"{n}", max_attempts=max_attempts) for n in range(24, 49)
        ]
    options = ("killer", "--concurrency", "50")
    worker = fleet.start(*options, lease=LEASE)
    deaths = 0

    def ended() -> bool:
        nonlocal worker, deaths
        if worker.ended():
            deaths += 1
            worker = fleet.start(*options, lease=LEASE)
        return column(db, "status", killer) == "dead" and statuses(db).get("succeeded") == 49

    wait_until(ended, 90, f"{statuses(db)}")
    assert statuses(db) == {"succeeded": 49, "dead": 1}
    assert fleet.ledger.count("killer") <= max_attempts + 2
    assert column(db, "attempts", killer) == max_attempts
    assert deaths <= 2, "a suspect ran in the company of others"
    assert all(column(db, "runs", task) <= 3 for task in healthy)


def test_h12_a_suspect_is_given_all_the_time_it_needs(db: Db, fleet: Fleet) -> None:
    """H12: the process that runs suspects alone takes one after the other and ends after the last.

    It is not told to stop while one runs: a suspect longer than the grace gets to its end.
    """
    tasks = [enqueue(db, "sleeps", 0.5) for _ in range(2)]
    ordinary = enqueue(db, "sleeps", 0)
    db.execute("update leasetask.task set suspect = true where id = any (%s)", [tasks])
    alone = fleet.start("recovery", "--alone", "--grace", "0", lease=LEASE)
    assert alone.wait() == 0
    for task in tasks:
        assert column(db, "(status, runs)", task) == ("succeeded", "1")
    first, second = fleet.ledger.entries("begins")
    assert first.pid == second.pid
    assert second.at - first.at >= 0.5
    assert column(db, "(status, runs)", ordinary) == ("pending", "0")


def test_h12_a_child_leaves_with_its_parent(db: Db, fleet: Fleet) -> None:
    """H12: the parent was killed: its child hands back what it runs, and does not stay for ever."""
    task = enqueue(db, "five_async")
    db.execute("update leasetask.task set suspect = true")
    gone = "1"
    orphan = fleet.start("recovery", "--alone", "--grace", "0", lease=60, LEASETASK_ALONE=gone)
    assert orphan.wait() == 0
    assert column(db, "status", task) == "pending"
    assert column(db, "attempts", task) <= 1


def test_h12_suspects_are_run_also_where_cron_sweeps(db: Db, fleet: Fleet) -> None:
    """H12: a worker that does not sweep itself still lets its suspects run, alone."""
    task = enqueue(db, "sleeps", 0)
    db.execute("update leasetask.task set suspect = true where id = %s", [task])
    worker = fleet.start("recovery", "--role", "worker", lease=LEASE)
    wait_for_status(db, task, "succeeded")
    assert fleet.ledger.entries("begins")[0].pid != worker.pid


def test_h12_a_program_that_cannot_be_imported_again(db: Db, fleet: Fleet) -> None:
    """H12: one that starts its worker at top level; its suspects run all the same.

    Importing it to run them alone must not start another worker, which would import it again.
    """
    task = enqueue(db, "odd")
    db.execute("update leasetask.task set suspect = true where id = %s", [task])
    fleet.run("unguarded")
    wait_for_status(db, task, "succeeded")
    assert fleet.ledger.count("odd") == 1
    assert fleet.ledger.count("imported") <= 2


# --- SIGSTOP -------------------------------------------------------------------------------------

FROZEN = {
    "frozen_in_step": "in a step",
    "frozen_between": "between",
    "frozen_at_end": "at the end",
    "frozen_async": "async",
}


def test_a_frozen_worker_is_refused_and_learns_of_it(db: Db, fleet: Fleet) -> None:
    """Must show (c), H02 with real processes: SIGSTOP past the lease, another finishes, SIGCONT.

    The first one's checkpoint and completion are refused, its handlers are told: in a step's body,
    between steps, at the end, and in an async body.
    """
    tasks = {kind: enqueue(db, kind) for kind in FROZEN}
    first = fleet.start("recovery", lease=LEASE)
    for where in FROZEN.values():
        fleet.ledger.wait_for(f"{where}: run 1")
    first.freeze()
    fleet.start("recovery", lease=LEASE)
    assert wait_for_end(db) == {"succeeded": len(FROZEN)}
    before = db.execute("select to_jsonb(t) from leasetask.task t order by id").fetchall()

    fleet.gate("thaw").touch()
    first.thaw()
    for where in ("in a step", "between", "async"):
        told = fleet.ledger.wait_for(f"{where}: told of the loss")
        assert told.pid == first.pid
    for kind, task in tasks.items():
        wait_until(lambda kind=kind, task=task: f"{kind} {task}: " in first.log, 10, "for the log")
        assert column(db, "result", task) == "run 2"
    assert fleet.ledger.count("between: a step after the loss") == 0
    after = db.execute("select to_jsonb(t) from leasetask.task t order by id").fetchall()
    assert after == before
    assert not first.ended()


def test_a_worker_that_claims_again_what_it_lost_keeps_it(db: Db, fleet: Fleet) -> None:
    """H02, one process: the old run, still in its thread, ends while the new one goes on.

    The end of the old run is refused and takes nothing of the new one with it: that is renewed for
    two leases more, and runs once.
    """
    task = enqueue(db, "outlived", 2 * LEASE)
    worker = fleet.start("recovery", lease=LEASE)
    fleet.ledger.wait_for("run 1 begins")
    worker.freeze()
    wait_until(lambda: lease_is_out(db, task))
    db.execute("select from leasetask.sweep()")
    worker.thaw()
    wait_until(lambda: len(fleet.ledger.entries()) > 1, what="for another run to begin")
    fleet.gate("second").touch()
    fleet.ledger.wait_for("run 1 ends")
    wait_for_status(db, task, "succeeded")
    # Frozen while a claim was on its way, the worker gives back what that claimed: one run more.
    last = column(db, "result", task)
    assert last == f"run {column(db, 'runs', task)}"
    ran = {entry.what for entry in fleet.ledger.entries()}
    assert ran == {f"{run} {what}" for run in ("run 1", last) for what in ("begins", "ends")}
    assert len(fleet.ledger.entries()) == 4
    assert "died" not in worker.log


def test_a_claim_that_is_answered_late_starts_nothing(
    db: Db, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen on the way, say: by our clock the lease is out, so the task goes back, unharmed."""
    app = App(dsn)
    ran = []
    claim = Claimer.claim

    @app.task(retry=Retry(max_attempts=1))
    def handler(ctx: Context) -> None:
        ran.append(ctx.run)

    async def claim_late(claimer: Claimer, n: int) -> list[Claimed]:
        claimed = await claim(claimer, n)
        for task in claimed:
            if task.runs == 1:
                await asyncio.to_thread(wait_until, lambda: lease_is_out(db, task.id))
        return claimed

    monkeypatch.setattr(Claimer, "claim", claim_late)
    task = app.enqueue(handler)
    with app.start(lease=LEASE, roles=("worker",)):
        assert app.wait(task.id, timeout=20).status == "succeeded"
    assert ran == [2]
    app.close()


def test_workers_die_freeze_and_stop_at_random(db: Db, fleet: Fleet) -> None:
    """H02, H12, H15, H17 together: three workers are killed, frozen, stopped and started again.

    Every task comes to the same result, each signal is consumed once, no budget is overspent; a
    step's body runs again only where its worker was taken away while it ran.
    """
    rng = random.Random(17)
    seconds, number = (60.0, 1000) if SOAK else (4.0, 100)
    for n in range(number):
        kind = rng.choice(("walk", "walk_async"))
        enqueue(db, kind, n, max_attempts=3, delay=rng.uniform(0, seconds * 0.8))
    unsent = list(range(number))
    rng.shuffle(unsent)

    def start() -> WorkerProcess:
        return fleet.start("recovery", "--grace", rng.choice(("0", "1")), lease=LEASE)

    workers = [start() for _ in range(3)]
    troubles = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass_time(rng.uniform(0.05, 0.5))
        for n in unsent[-number // 10 :]:
            db.execute("select leasetask.signal('walk-' || %s, '2')", [n])
            unsent.pop()
        place = rng.randrange(3)
        trouble = rng.choice(("kill", "terminate", "freeze", "thaw"))
        getattr(workers[place], trouble)()
        if trouble in ("kill", "terminate"):
            workers[place].thaw()
            workers[place] = start()
            troubles += 1
    for worker in workers:
        worker.thaw()
    for n in unsent:
        db.execute("select leasetask.signal('walk-' || %s, '2')", [n])
    assert wait_for_end(db, 60) == {"succeeded": number}
    odd = db.execute("select id from leasetask.task where result <> '[0, 1, 2, 3, 4]'").fetchall()
    assert odd == []
    row = db.execute("select count(*) from leasetask.task_signal where consumed_by is null")
    assert row.fetchone() == (0,)
    bodies = Counter(entry.what for entry in fleet.ledger.entries())
    assert len(bodies) == 4 * number
    again = sum(times - 1 for times in bodies.values())
    assert again <= 40 * (troubles + 1)


# --- busy past the lease ------------------------------------------------------------------------


def test_h07_a_blocked_loop_keeps_its_lease(db: Db, fleet: Fleet) -> None:
    """H07: time.sleep(3 leases) in an async handler, and a pure-Python busy loop: one run each."""
    tasks = {kind: enqueue(db, kind, 3 * LEASE) for kind in ("blocks_the_loop", "spins")}
    for _ in tasks:
        fleet.start("recovery", "--concurrency", "1", lease=LEASE)
    fleet.ledger.wait_for("begins", times=2)
    fleet.start("noop", lease=LEASE)
    assert wait_for_end(db) == {"succeeded": 2}
    assert fleet.ledger.count("begins") == 2
    assert {column(db, "runs", task) for task in tasks.values()} == {1}


def test_h07_a_call_that_holds_the_gil_may_lose_its_lease(db: Db, fleet: Fleet) -> None:
    """H07: no thread can renew meanwhile; the completion is refused, a warning names the task."""
    task = enqueue(db, "holds_the_gil", 3)
    first = fleet.start("recovery", lease=LEASE)
    fleet.ledger.wait_for("run 1 begins")
    fleet.start("recovery", lease=LEASE)
    wait_for_status(db, task, "succeeded")
    assert fleet.ledger.wait_for("run 2 ends").pid != first.pid
    fleet.ledger.wait_for("run 1 ends")
    wait_until(lambda: f"WARNING leasetask: holds_the_gil {task}" in first.log, 10, "for the log")
    assert column(db, "result", task) == "run 2"
    assert column(db, "runs", task) == 2


def test_h08_a_task_of_many_leases_runs_once(db: Db, fleet: Fleet) -> None:
    """H08: the lease is short, the task is long (six leases; soak: ten), another worker sweeps.

    Also when the kind has a shorter lease of its own than its worker: renewals follow the shortest.
    """
    leases = 10 if SOAK else 6
    long = enqueue(db, "sleeps", leases * 0.5)
    fleet.start("recovery", "--concurrency", "1", lease=0.5)
    fleet.ledger.wait_for("begins")
    own = enqueue(db, "short_lease", leases * 0.5)
    fleet.start("recovery", "--concurrency", "1", lease=3)
    fleet.ledger.wait_for("begins", times=2)
    fleet.start("noop", lease=LEASE)
    assert wait_for_end(db) == {"succeeded": 2}
    assert fleet.ledger.count("begins") == 2
    assert {column(db, "runs", task) for task in (long, own)} == {1}


def test_h06_heartbeats_go_on_while_it_stops(db: Db, fleet: Fleet) -> None:
    """H06: SIGTERM with a handler that runs three leases long, in a thread or blocking the loop.

    It ends, once, and the worker after it.
    """
    tasks = {kind: enqueue(db, kind, 3 * LEASE) for kind in ("sleeps", "blocks_the_loop")}
    workers = [fleet.start("recovery", "--concurrency", "1", lease=LEASE) for _ in tasks]
    fleet.ledger.wait_for("begins", times=2)
    fleet.start("recovery", lease=LEASE)
    for worker in workers:
        worker.terminate()
    assert [worker.wait() for worker in workers] == [0, 0]
    assert statuses(db) == {"succeeded": 2}
    assert fleet.ledger.count("begins") == fleet.ledger.count("ends") == 2
    assert {column(db, "runs", task) for task in tasks.values()} == {1}


# --- tokens --------------------------------------------------------------------------------------

STALE_WRITES = {
    "heartbeat": """, '1 hour', array['{"fraction": 1}'::jsonb]""",
    "checkpoint": """, array['{"late": {"n": 9, "ok": 1}}'::jsonb], '1 hour'""",
    "note": """, array['{"late": {"started": true}}'::jsonb], '1 hour'""",
    "abandon": ", 0",
    "finish": ", array['1'::jsonb]",
    "suspend": """, array['sleep'], array['late'], array[9], array[null], array[60.0],
      array[null]::timestamptz[], array[null]::pg_snapshot[]""",
    "release": "",
    "fail": ", array['{}'::jsonb], array[false]",
}
"""Everything that a claim allows: the functions and their arguments after ids and tokens."""


def claim_one(db: Db) -> tuple[uuid.UUID, int]:
    """Claim the only task; return its token and its attempts."""
    rows = db.execute(
        "select lease_token, attempts from leasetask.claim('w', array['k'], array[1], 1, '1 hour')"
    ).fetchall()
    return rows[0]


def write(db: Db, function: str, task_id: str, token: uuid.UUID) -> str:
    """Call one of the functions with a token, and return its answer."""
    rows = db.execute(
        f"select answer from leasetask.{function}(array[%s]::uuid[], array[%s]::uuid[]"
        f"{STALE_WRITES[function]})",
        [task_id, token],
    ).fetchall()
    return str(rows[0][0])


def suspend(db: Db, task_id: str, token: uuid.UUID, number: int) -> None:
    """Let a claimed task sleep for no time."""
    db.execute(
        "select from leasetask.suspend(array[%s]::uuid[], array[%s]::uuid[], array['sleep'],"
        " array['sleep-' || %s], array[%s]::int[], array[null], array[0],"
        " array[null]::timestamptz[], array[null]::pg_snapshot[])",
        [task_id, token, number, number],
    )


@pytest.mark.parametrize("function", STALE_WRITES)
def test_h03_a_late_write_of_an_earlier_claim_is_refused(db: Db, function: str) -> None:
    """H03: claim, suspend, claim again, at the same attempt: the first token is good for nothing.

    A repeated end of the first claim may hear that it is done, since it is; it changes nothing.
    """
    task = enqueue(db, "k")
    old, attempts = claim_one(db)
    suspend(db, task, old, 1)
    new, attempts_now = claim_one(db)
    assert (attempts_now, new != old) == (attempts, True)
    row = column(db, "to_jsonb(task)", task)
    ends = ("finish", "suspend", "release", "fail")
    assert write(db, function, task, old) == ("done" if function in ends else "lost")
    assert write(db, function, task, uuid.uuid4()) == "lost"
    assert column(db, "to_jsonb(task)", task) == row


def test_h03_no_token_comes_twice(db: Db) -> None:
    """H03: a token is drawn at each claim, whatever the attempts say."""
    task = enqueue(db, "k")
    tokens = []
    for number in range(1, 41):
        token, attempts = claim_one(db)
        assert attempts == 1
        tokens.append(token)
        suspend(db, task, token, number)
    assert len(set(tokens)) == 40


# --- the local deadline ------------------------------------------------------------------------


def test_an_async_body_is_cancelled_when_its_lease_is_swept(dsn: str, db: Db) -> None:
    """Must show (c): the handler learns of the loss although it uses no verb."""
    app = App(dsn)
    told: list[str] = []

    @app.task
    async def stands(ctx: Any) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            told.append(ctx.task_id)
            raise

    task = app.enqueue(stands).id
    try:
        with app.start(lease=LEASE, grace=0, roles=("worker",)):
            wait_for_status(db, task, "running")
            db.execute(
                "update leasetask.task set status = 'pending', lease_token = null,"
                " lease_until = null, lease_owner = null, next_run_at = 'infinity' where id = %s",
                [task],
            )
            wait_until(lambda: told == [task])
    except LeaseTaskError as error:
        raise AssertionError("the worker must go on") from error
    finally:
        app.close()
