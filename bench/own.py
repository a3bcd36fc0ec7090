"""The workloads that only leasetask runs, by subject."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

from bench import business, crowd, idle, recovery
from bench.common import Adapted, adapted, drain, enqueue
from bench.engines import LEASETASK
from bench.floor import BATCHED, INSERT
from bench.lab import Case, Lab


def cases(lab: Lab) -> Iterator[Case]:
    """Give them all."""
    adapter: Adapted = partial(adapted, lab, LEASETASK, [sys.executable])
    n = lab.size(20_000, 10_000)
    yield Case(
        "drain",
        "leasetask, `def` handlers",
        "tasks/s",
        lambda: drain(lab, adapter, "noop_def", n),
        BATCHED,
    )
    one = lab.size(2_000, 1_000)
    in_transaction = partial(enqueue, lab, adapter, "transaction", one)
    yield Case(
        "enqueue one by one",
        "leasetask, each with a business row",
        "tasks/s",
        in_transaction,
        INSERT,
    )
    yield from recovery.cases(lab, adapter)
    yield from crowd.cases(lab, adapter)
    yield from business.cases(lab, adapter)
    yield from idle.cases(lab, adapter)
