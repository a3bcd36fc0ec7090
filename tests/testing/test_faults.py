"""How the harness kills, freezes and counts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import six_steps
from conftest import SOAK

from leasetask import App, AsyncContext, Context
from leasetask.errors import ConfigurationError
from leasetask.model import TaskView
from leasetask.testing import (
    DoesNotSurvive,
    Engine,
    Fault,
    Scenario,
    Schedule,
    crash_anywhere,
    faults,
)
from leasetask.testing.server import Databases


@pytest.fixture(scope="module")
def scratch(leasetask_databases: Databases) -> Iterator[str]:
    """One database for all tests here: each run empties it."""
    with leasetask_databases.fresh() as dsn:
        yield dsn


@pytest.fixture
def app() -> App:
    return App("postgresql://localhost/not-used")


def succeeded(world: Any, outcome: TaskView) -> None:
    assert outcome.status == "succeeded", outcome.last_error


# --- how many schedules there are -------------------------------------------------------------------

SIX = {"check": six_steps.paid_once, "world": six_steps.bank.open}


def test_all_single_faults_of_six_steps_are_tried(scratch: str) -> None:
    survived = crash_anywhere(six_steps.app, six_steps.six_steps, 1, dsn=scratch, **SIX)
    points = survived.points
    # Four plain steps of 4 points, an effect of 6, a transaction of 3, the end's 2.
    assert points == 4 * 4 + 6 + 3 + 2
    assert survived.schedules == {
        "undisturbed": 1,
        "crash": points,
        "zombie": points,
        "zombie wake": points,
        "cut": 8,  # six results, an effect's start, the end
        "cancel": points,
        "double": points,
    }


@pytest.mark.skipif(not SOAK, reason="make long")
def test_all_ordered_pairs_of_crashes_of_six_steps_are_tried(scratch: str) -> None:
    survived = crash_anywhere(
        six_steps.app,
        six_steps.six_steps,
        1,
        faults=["crash"],
        pairs="all",
        dsn=scratch,
        **SIX,
    )
    assert set(survived.schedules) == {"undisturbed", "crash", "crash crash"}
    assert survived.schedules["crash"] == 27
    # After a crash at the end nothing is left; after one at the start, all of it again.
    assert 27 * 27 / 3 < survived.schedules["crash crash"] < 27 * 27


def test_all_ordered_pairs_of_crashes_are_tried(scratch: str, app: App) -> None:
    @app.task
    def two_steps(ctx: Context) -> None:
        ctx.step("one", lambda: None)
        ctx.step("two", lambda: None)

    survived = crash_anywhere(
        app, two_steps, check=succeeded, faults=["crash"], pairs="all", dsn=scratch
    )
    assert survived.points == 10
    # The second run has all ten points until `one` is recorded, six until `two` is, then two.
    assert survived.schedules == {
        "undisturbed": 1,
        "crash": 10,
        "crash crash": 3 * 10 + 4 * 6 + 2 * 2,
    }
    assert survived.runs == 69


def test_other_pairs_are_chosen_by_seed(
    scratch: str, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    def one_step(ctx: Context) -> None:
        ctx.step("one", lambda: None)

    played: list[Schedule] = []
    original = Scenario.play

    def play(self: Scenario, engine: Engine, schedule: Schedule = ()) -> Any:
        played.append(schedule)
        return original(self, engine, schedule)

    monkeypatch.setattr(Scenario, "play", play)
    pairs = []
    for seed in (1, 1, 2):
        crash_anywhere(
            app,
            one_step,
            check=succeeded,
            faults=["crash", "zombie"],
            pairs=5,
            seed=seed,
            dsn=scratch,
        )
        pairs.append(played[-5:])
    assert pairs[0] == pairs[1] != pairs[2]
    assert {len(pair) for pair in pairs[0]} == {2}


# --- a crash is a crash ------------------------------------------------------------------------------


def test_a_crash_runs_no_finally(scratch: str, app: App) -> None:
    unwound: list[str] = []

    @app.task
    def sync(ctx: Context) -> None:
        try:
            ctx.step("one", lambda: None)
        finally:
            unwound.append("sync")

    @app.task
    async def coroutine(ctx: AsyncContext) -> None:
        try:
            await ctx.step("one", lambda: None)
        finally:
            unwound.append("async")

    for task in (sync, coroutine):
        unwound.clear()
        with Engine(app, scratch) as engine:
            played = Scenario(task, check=succeeded).play(engine, (Fault("crash", 1),))
        assert played.failure is None
        assert len(played.points) == 2
        assert len(unwound) == 1, "the second worker's, and not the first one's"


def test_a_crash_stops_all_branches_at_once(scratch: str, app: App) -> None:
    ended: list[str] = []

    async def slow(name: str) -> None:
        await asyncio.sleep(0.02)
        ended.append(name)

    @app.task
    async def branches(ctx: AsyncContext) -> None:
        await asyncio.gather(
            ctx.step("slow", slow, "slow"), ctx.step("quick", lambda: None), asyncio.sleep(0.05)
        )

    with Engine(app, scratch) as engine:
        scenario = Scenario(branches, world=ended.clear, check=succeeded)
        undisturbed = scenario.play(engine)
        at = [str(point) for point in undisturbed.points[0]].index("after the body of 'quick'")
        assert ended == ["slow"]
        for kind in ("crash", "zombie"):
            played = scenario.play(engine, (Fault(kind, at),))
            assert played.failure is None
            # A crashed worker's other branches never go on; a frozen one's do when it wakes.
            assert len(ended) == {"crash": 1, "zombie": 2}[kind]


def test_a_crash_frees_what_the_process_held_in_the_database(scratch: str, app: App) -> None:
    @app.task
    def locks(ctx: Context) -> None:
        with psycopg.connect(app.dsn) as db:
            db.execute("create table if not exists held (n int)")
            db.execute("lock table held")
            ctx.step("look", lambda: None)

    assert crash_anywhere(app, locks, check=succeeded, faults=["crash", "cut"], dsn=scratch).points


def test_what_a_frozen_process_holds_is_told(
    scratch: str, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_PATIENCE", 0.5)

    @app.task
    def locks(ctx: Context) -> None:
        with psycopg.connect(app.dsn) as db:
            db.execute("create table if not exists kept (n int)")
            db.execute("lock table kept")
            ctx.step("look", lambda: None)

    with pytest.raises(DoesNotSurvive) as refused:
        crash_anywhere(app, locks, check=succeeded, faults=["zombie"], dsn=scratch)
    assert "worker B hangs" in str(refused.value)
    assert "a dead or frozen worker still holds" in str(refused.value)


def test_crashes_in_many_transactions_do_not_use_connections_up(scratch: str, app: App) -> None:
    @app.task
    def writes(ctx: Context) -> None:
        for number in range(8):
            ctx.transaction(f"write-{number}", lambda db: None)

    survived = crash_anywhere(app, writes, check=succeeded, faults=["crash"], dsn=scratch)
    assert survived.points == 8 * 3 + 2


# --- what crash_anywhere is given, and gives ---------------------------------------------------------


def test_a_report_is_replayed_by_its_line(scratch: str, app: App) -> None:
    calls: list[str] = []

    @app.task
    def charges(ctx: Context) -> None:
        ctx.step("charge", calls.append, "charge")

    options: dict[str, Any] = {
        "world": calls.clear,
        "check": lambda world, outcome: len(calls) < 2,
        "dsn": scratch,
    }
    with pytest.raises(DoesNotSurvive) as refused:
        crash_anywhere(app, charges, **options)
    assert refused.value.schedule == "crash@1"
    assert 'only="crash@1"' in str(refused.value)
    assert "check returned False" in str(refused.value)
    with pytest.raises(DoesNotSurvive) as again:
        crash_anywhere(app, charges, only=refused.value.schedule, **options)
    assert str(again.value) == str(refused.value)
    assert crash_anywhere(app, charges, only="crash@0", **options).runs == 1
    for wrong in ("crush@1", "crash@x", "crash 1"):
        with pytest.raises(ConfigurationError, match="is no fault"):
            crash_anywhere(app, charges, only=wrong, **options)


def test_a_check_that_raises_is_told(scratch: str, app: App) -> None:
    @app.task
    def nothing(ctx: Context) -> None:
        pass

    def check(world: Any, outcome: TaskView) -> None:
        raise KeyError("order")

    with pytest.raises(DoesNotSurvive, match=r"check raised KeyError: 'order'"):
        crash_anywhere(app, nothing, check=check, dsn=scratch)


def test_the_app_is_on_the_scratch_database_meanwhile(scratch: str, app: App) -> None:
    seen: set[str] = set()
    children: list[int] = []

    @app.task
    def parent(ctx: Context) -> None:
        seen.add(app.dsn)
        ctx.step("send", lambda: app.enqueue(child, None, key=ctx.task_id).id)

    @app.task
    def child(ctx: Context) -> None:
        children.append(1)

    before = app.dsn
    crash_anywhere(app, parent, check=succeeded, faults=["crash"], dsn=scratch)
    assert seen == {scratch}
    assert children
    assert app.dsn == before


def test_a_world_is_made_anew_with_the_dsn_or_without(scratch: str, app: App) -> None:
    @app.task
    def nothing(ctx: Context) -> None:
        pass

    made: list[str] = []
    crash_anywhere(
        app,
        nothing,
        world=made.append,
        check=succeeded,
        faults=["crash"],
        dsn=scratch,
    )
    assert made == [scratch] * 3  # undisturbed, and at two points


def test_nothing_is_said_at_the_interpreters_end(scratch: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import asyncio, sys
from leasetask import App
from leasetask.testing import crash_anywhere
app = App("postgresql://localhost/not-used")

@app.task
async def branches(ctx):
    try:
        await asyncio.gather(ctx.step("a", asyncio.sleep, 0), ctx.step("b", asyncio.sleep, 0))
    finally:
        print("unwound")

@app.task
def plain(ctx):
    try:
        ctx.step("a", print, "body")
    finally:
        print("unwound")

for task in (branches, plain):
    print(crash_anywhere(app, task, check=lambda w, o: True, dsn=sys.argv[1]).runs > 20)
print("END")
"""
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", str(script), scratch],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # asyncio's debug mode, which -X dev turns on, also tells of callbacks that a busy machine made slow.
    said = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert (done.returncode, said) == (0, [])
    assert done.stdout.rstrip().endswith("END"), "what crashed is not unwound at the end either"
