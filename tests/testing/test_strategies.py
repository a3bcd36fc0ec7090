"""Hypothesis explores: schedules that shrink, and properties that span several tasks."""

from __future__ import annotations

from collections import Counter

import pytest
import six_steps
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from leasetask import App, Context
from leasetask.testing import DoesNotSurvive, Engine, Fault, Scenario, Schedule
from leasetask.testing.schedule import in_words, parse
from leasetask.testing.strategies import EngineMachine, schedules

QUICK = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


# --- schedules -------------------------------------------------------------------------------------


@given(schedules())
def test_a_schedule_is_read_as_it_is_written(schedule: Schedule) -> None:
    assert parse(in_words(schedule)) == schedule


def test_schedules_draw_what_they_are_told() -> None:
    drawn = schedules(faults=["crash", "cancel"], most=2, points=5)

    @settings(QUICK, max_examples=200)
    @given(drawn)
    def check(schedule: Schedule) -> None:
        assert len(schedule) <= 2
        assert all(f.kind in ("crash", "cancel") and 0 <= f.point <= 5 for f in schedule)

    check()


def test_a_failing_schedule_shrinks_to_the_smallest(leasetask_db: str) -> None:
    app, charges = App("postgresql://localhost/not-used"), []

    @app.task
    def charges_once_or_more(ctx: Context, amounts: list[int]) -> None:
        ctx.step("look", lambda: None)
        for number, amount in enumerate(amounts):
            ctx.step(f"charge-{number}", charges.append, amount)

    with Engine(app, leasetask_db) as engine:

        def fails(drawn: tuple[list[int], Schedule]) -> bool:
            amounts, schedule = drawn
            scenario = Scenario(
                charges_once_or_more,
                amounts,
                world=charges.clear,
                check=lambda world, outcome: charges == amounts,
            )
            return scenario.play(engine, schedule).failure is not None

        amounts = st.lists(st.integers(1, 9), max_size=3)
        schedule = schedules(faults=["crash", "zombie"], points=12)
        smallest = find(
            st.tuples(amounts, schedule), fails, settings=settings(QUICK, max_examples=300)
        )
    # One amount, one crash: after its body and before its checkpoint.
    assert smallest == ([1], (Fault("crash", 5),))


def test_a_right_handler_survives_all_that_is_drawn(leasetask_db: str) -> None:
    with Engine(six_steps.app, leasetask_db) as engine:

        @QUICK
        @given(order=st.integers(1, 1), schedule=schedules(points=30))
        def check(order: int, schedule: Schedule) -> None:
            Scenario(
                six_steps.six_steps, order, six_steps.bank.open, six_steps.paid_once
            ).assert_survives(engine, schedule)

        check()


def test_a_refusal_is_the_report(leasetask_db: str) -> None:
    app, charges = App("postgresql://localhost/not-used"), []

    @app.task
    def charges_twice(ctx: Context) -> None:
        ctx.step("charge", charges.append, 1)

    with Engine(app, leasetask_db) as engine:
        scenario = Scenario(
            charges_twice, world=charges.clear, check=lambda world, outcome: len(charges) == 1
        )
        scenario.assert_survives(engine)
        with pytest.raises(DoesNotSurvive, match="step 'charge' runs again"):
            scenario.assert_survives(engine, (Fault("crash", 2),))


# --- several tasks and signals ------------------------------------------------------------------------

shop = App("postgresql://localhost/not-used")
shipped: Counter[int] = Counter()


@shop.task
def ship(ctx: Context, order: int) -> int:
    paid: int = ctx.wait_signal(f"paid:{order}")
    ctx.transaction(
        "ship", lambda db: db.execute("insert into parcel values (%s)", [order]) and None
    )
    return paid


class Shop(EngineMachine):
    """Orders that are paid once or more, and shipped once."""

    app = shop

    def begin(self) -> None:
        self.engine.db.execute("drop table if exists parcel; create table parcel (n int)")
        self.paid: set[int] = set()

    @rule(order=st.integers(1, 3))
    def order(self, order: int) -> None:
        self.engine.enqueue(ship, order, key=f"order-{order}")

    @rule(order=st.integers(1, 3))
    def pay(self, order: int) -> None:
        self.engine.signal(f"paid:{order}", order)
        self.paid.add(order)

    @invariant()
    def each_parcel_is_paid_and_sent_once(self) -> None:
        rows = [row[0] for row in self.engine.db.execute("select n from parcel")]
        assert len(rows) == len(set(rows))
        assert set(rows) <= self.paid


class Careless(Shop):
    """The same, with a handler that ships twice."""

    app = App("postgresql://localhost/not-used")

    @rule(order=st.integers(1, 2))
    def order(self, order: int) -> None:
        self.engine.enqueue(careless, order, key=f"order-{order}")
        self.pay(order)


@Careless.app.task
def careless(ctx: Context, order: int) -> None:
    ctx.step("ship", _ship, order)


def _ship(order: int) -> None:
    import psycopg

    with psycopg.connect(Careless.app.dsn) as db:
        db.execute("insert into parcel values (%s)", [order])


STEPS = settings(QUICK, max_examples=8, stateful_step_count=12)


def test_a_property_over_several_tasks_holds() -> None:
    run_state_machine_as_test(Shop, settings=STEPS)


def test_a_property_over_several_tasks_is_refuted(capsys: pytest.CaptureFixture[str]) -> None:
    thorough = settings(STEPS, max_examples=300, stateful_step_count=8, phases=[Phase.generate])
    with pytest.raises(AssertionError) as refuted:
        run_state_machine_as_test(Careless, settings=thorough)
    story = "\n".join(getattr(refuted.value, "__notes__", [])) + capsys.readouterr().out
    assert "state.order(order=" in story
    assert "state.work_and_die(point=" in story
