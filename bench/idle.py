"""What a worker costs that has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from bench.common import Adapted
from bench.lab import Case, Lab, Sample
from bench.meter import Meter


def cases(lab: Lab, adapted: Adapted) -> Iterator[Case]:
    """One case: statements a second, and CPU."""
    yield Case("idle worker", "leasetask", "statements/s", partial(idle, lab, adapted), times=1)


def idle(lab: Lab, adapted: Adapted) -> Sample:
    """Statements a second, once it has found out that there is nothing."""
    with adapted() as (dsn, adapter), Meter(lab.server, dsn) as meter, adapter.start() as process:
        time.sleep(4)
        began = meter.read([process.pid])
        time.sleep(lab.size(30, 8))
        ended = meter.read([process.pid])
        seconds = ended.at - began.at
        cpu = (ended.client - began.client) / seconds * 100
        return Sample((ended.statements - began.statements) / seconds, detail={"cpu_percent": cpu})
