"""What an enqueue's notification costs the user's own commits, while workers are busy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import psycopg

from bench.common import Adapted
from bench.floor import pgbench_rate
from bench.lab import Case, Lab, Sample, wait_until

_SCRIPT = """begin;
insert into orders (customer, amount) values (:client_id, 7);
select leasetask.enqueue('noop', '1');
commit;
"""


def cases(lab: Lab, adapted: Adapted) -> Iterator[Case]:
    """Sixteen and thirty-two clients, on the disk as it is and on one whose flush takes 2 ms."""
    for clients in (16,) if lab.quick else (16, 32):
        for delay in (0, 2000):
            flush = "a flush of 2 ms" if delay else "the disk's own flush"
            run = partial(business, lab, adapted, clients, delay)
            yield Case("business", f"{clients} clients, {flush}", "×", run, times=lab.times)


def business(lab: Lab, adapted: Adapted, clients: int, delay: int) -> Sample:
    """Transactions/s with the notification, as a share of those without."""
    lab.server.set("commit_delay", str(delay))
    lab.server.set("commit_siblings", "0" if delay else "5")
    try:
        plain = rate(lab, adapted, clients, notify=False)
        notifying = rate(lab, adapted, clients, notify=True)
    finally:
        lab.server.set("commit_delay", "0")
        lab.server.set("commit_siblings", "5")
    return Sample(notifying / plain, detail={"with_per_s": notifying, "without_per_s": plain})


def rate(lab: Lab, adapted: Adapted, clients: int, *, notify: bool) -> float:
    """Business transactions/s, each with an enqueue, while a worker runs what is enqueued."""
    with adapted() as (dsn, adapter):
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create table orders (id bigserial primary key, customer int, amount int)")
            if not notify:
                conn.execute(
                    "create or replace function leasetask.wake() returns void language sql as ''"
                )
        adapter.ask("enqueue", "noop", lab.size(20_000, 5_000))
        with adapter.start():
            wait_until(lambda: adapter.marks("first"), 60, "the first task")
            return pgbench_rate(dsn, _SCRIPT, clients, lab.size(5, 2))
