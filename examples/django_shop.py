"""Orders with Django: enqueued in `atomic`, marked paid in one commit.

A single file for the example's sake; in a project, the App stands in an app's `tasks.py`, and
`leasetask worker shop.tasks:app` runs it after `django.setup()`.
Run it with LEASETASK_DSN set, after `leasetask migrate`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings
from django.db import connection, transaction
from psycopg.conninfo import conninfo_to_dict

from leasetask import App, Context

parts = conninfo_to_dict(os.environ["LEASETASK_DSN"])
settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts["dbname"],
            "USER": parts.get("user", ""),
            "PASSWORD": parts.get("password", ""),
            "HOST": parts.get("host", ""),
            "PORT": parts.get("port", ""),
        }
    },
    USE_TZ=True,
)
django.setup()


@contextmanager
def atomic() -> Iterator[Any]:
    """One transaction on this thread's connection; handler threads must not keep it open."""
    try:
        with transaction.atomic():
            yield connection
    finally:
        connection.close()


app = App(transactions=atomic)


def mark_paid(db: Any, order_id: int) -> bool:
    """The business write, with Django's cursor or its ORM alike."""
    with db.cursor() as cursor:
        cursor.execute("update shop_order set paid = true where id = %s", [order_id])
    return True


@app.task
def charge(ctx: Context, order_id: int) -> bool:
    """Charge an order and mark it paid."""
    ctx.step("charge", lambda: f"charged {order_id}")
    return ctx.transaction("mark paid", mark_paid, order_id)


def main() -> None:
    """Place an order, run a worker until it is paid, and look."""
    with connection.cursor() as cursor:
        cursor.execute("create table if not exists shop_order (id int primary key, paid bool)")
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("insert into shop_order values (1, false)")
        task = app.enqueue(charge, 1, key="charge-1", conn=connection)
    with app.start(concurrency=2):
        print(app.wait(task.id, timeout=30).status)
    with connection.cursor() as cursor:
        cursor.execute("select paid from shop_order")
        print("paid:", [row[0] for row in cursor.fetchall()])
    connection.close()


if __name__ == "__main__":
    main()
