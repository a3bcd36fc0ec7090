"""mode="process": workers that really are killed and frozen."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest
import six_steps
from conftest import SOAK

from leasetask import App, Context
from leasetask.errors import ConfigurationError
from leasetask.model import TaskView
from leasetask.testing import DoesNotSurvive, crash_anywhere

app = App("postgresql://localhost/not-used")

OWN = {"mode": "process", "world_at": "test_process:outside"}


class Outside:
    """Sees who comes to it."""

    def open(self) -> Outside:
        self.callers: list[int] = []
        self.orders = {"o-1": 7}
        return self

    def call(self, caller: int) -> int:
        self.callers.append(caller)
        return len(self.callers)

    def refuse(self) -> None:
        raise ValueError("not today")


outside: Any = Outside()


@app.task
def calls(ctx: Context) -> int:
    try:
        outside.refuse()
    except ValueError as refused:
        assert str(refused) == "not today"
    amount: int = outside.orders["o-1"]
    ctx.step("call", lambda: outside.call(os.getpid()))
    return amount


@app.task
def dies_by_itself(ctx: Context) -> None:
    if os.getpid() != int(os.environ["TEST_PROCESS"]):
        os._exit(3)
    ctx.step("one", lambda: None)


@app.task
def locks(ctx: Context) -> None:
    with psycopg.connect(app.dsn) as db:
        db.execute("lock table leasetask.kind")
        ctx.step("look", lambda: None)


def succeeded(world: Any, outcome: TaskView) -> None:
    assert outcome.status == "succeeded", outcome.last_error


def test_a_killed_worker_is_a_process_and_the_world_is_here(leasetask_db: str) -> None:
    seen: list[list[int]] = []

    def check(world: Outside, outcome: TaskView) -> None:
        succeeded(world, outcome)
        assert outcome.result == 7
        assert world is outside
        seen.append(world.callers)

    survived = crash_anywhere(
        app,
        calls,
        world=outside.open,
        check=check,
        faults=["crash"],
        dsn=leasetask_db,
        **OWN,
    )
    assert survived.schedules == {"undisturbed": 1, "crash": 6}
    here = os.getpid()
    assert seen[:2] == [[here], [here]], "undisturbed, and killed before the body"
    for first, second in seen[2:4]:
        assert first != here == second, "killed after the body"
    assert all(len(callers) == 1 and callers != [here] for callers in seen[4:])


def test_a_wrong_handler_is_caught_by_real_kills_and_real_freezes(leasetask_db: str) -> None:
    options: dict[str, Any] = {
        "world": outside.open,
        "check": lambda world, outcome: len(world.callers) == 1,
        "dsn": leasetask_db,
        **OWN,
    }
    with pytest.raises(DoesNotSurvive) as refused:
        crash_anywhere(app, calls, faults=["crash"], **options)
    report = str(refused.value)
    assert "worker A died after the body of 'call' returned and before its checkpoint" in report
    assert "worker B ran the body of 'call' again" in report
    assert "step 'call' runs again" in report
    for schedule in ("zombie@0", "zombie@0 wake@0"):
        with pytest.raises(DoesNotSurvive) as frozen:
            crash_anywhere(app, calls, only=schedule, **options)
        assert "worker A froze before the body of 'call'" in str(frozen.value)
        assert "step 'call' runs again" in str(frozen.value)


SOME = ["crash@10", "crash@20", "crash@19 crash@1", "zombie@10 wake@1"]
"""An effect's start and its do, a transaction before its commit, and its function."""


def test_a_right_handler_survives_real_kills(leasetask_db: str) -> None:
    for schedule in [None] if SOAK else SOME:
        crash_anywhere(
            six_steps.app,
            six_steps.six_steps,
            1,
            world=six_steps.bank.open,
            check=six_steps.paid_once,
            faults=["crash", "zombie"],
            only=schedule,
            dsn=leasetask_db,
            mode="process",
            world_at="six_steps:bank",
        )


def test_a_real_kill_frees_what_the_process_held(leasetask_db: str) -> None:
    crash_anywhere(app, locks, check=succeeded, only="crash@0", dsn=leasetask_db, mode="process")


def test_a_process_that_cannot_work_is_told(
    leasetask_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PROCESS", str(os.getpid()))
    with pytest.raises(ConfigurationError, match="ended by itself, with status 3"):
        crash_anywhere(
            app, dies_by_itself, check=succeeded, faults=["crash"], dsn=leasetask_db, mode="process"
        )
    hidden = App("postgresql://localhost/not-used")

    @hidden.task
    def nothing(ctx: Context) -> None:
        pass

    with pytest.raises(ConfigurationError, match="another process can import"):
        crash_anywhere(hidden, nothing, check=succeeded, dsn=leasetask_db, mode="process")


def test_no_process_is_left(leasetask_db: str) -> None:
    crash_anywhere(
        app,
        calls,
        world=outside.open,
        check=lambda world, outcome: True,
        only="zombie@1",
        dsn=leasetask_db,
        **OWN,
    )
    mine = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/stat")
        if f"({os.getpid()})" in path.read_text() or path.read_text().split()[3] == str(os.getpid())
    ]
    stopped = [pid for pid in mine if " T " in Path(f"/proc/{pid}/stat").read_text()]
    assert stopped == []
    assert signal.getsignal(signal.SIGCHLD) in (signal.SIG_DFL, None)
