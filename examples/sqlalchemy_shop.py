"""Orders with SQLAlchemy: enqueued in the session's transaction, marked paid in one commit.

Run it with LEASETASK_DSN set, after `leasetask migrate`.
"""

import os

import psycopg
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from leasetask import App, Context

engine = create_engine(
    "postgresql+psycopg://", creator=lambda: psycopg.connect(os.environ["LEASETASK_DSN"])
)
Sessions = sessionmaker(engine)
app = App(transactions=Sessions.begin)


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """One order."""

    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    paid: Mapped[bool] = mapped_column(default=False)


def mark_paid(session: Session, order_id: int) -> bool:
    """The business write: committed together with the step's record, or not at all."""
    order = session.get_one(Order, order_id)
    order.paid = True
    session.flush()
    return order.paid


@app.task
def charge(ctx: Context, order_id: int) -> bool:
    """Charge an order and mark it paid."""
    ctx.step("charge", lambda: f"charged {order_id}")
    return ctx.transaction("mark paid", mark_paid, order_id)


def main() -> None:
    """Place an order, run a worker until it is paid, and look."""
    Base.metadata.create_all(engine)
    with Sessions.begin() as session:
        order = Order()
        session.add(order)
        session.flush()
        task = app.enqueue(charge, order.id, key=f"charge-{order.id}", conn=session)
    with app.start(concurrency=2):
        print(app.wait(task.id, timeout=30).status)
    with Sessions() as session:
        print("paid:", session.scalars(select(Order.paid)).all())
    engine.dispose()


if __name__ == "__main__":
    main()
