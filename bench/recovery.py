"""How long a task lies after a kill -9 of its worker, until another one runs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from bench.common import Adapted
from bench.lab import Case, Lab, Sample, wait_until


def cases(lab: Lab, adapted: Adapted) -> Iterator[Case]:
    """A short lease; in a full run the default one too."""
    yield Case("recovery", "lease 3 s", "s", partial(recovery, adapted, 3), times=lab.times)
    if not lab.quick:
        yield Case(
            "recovery", "lease 30 s, the default", "s", partial(recovery, adapted, 30), times=1
        )


def recovery(adapted: Adapted, lease: int) -> Sample:
    """From the kill to the second start of the handler."""
    with adapted() as (_, adapter):
        adapter.ask("enqueue", "hold", 1)
        with adapter.start(BENCH_LEASE=str(lease)) as first:
            wait_until(lambda: adapter.marks("hold"), 30, "the first run")
            with adapter.start(BENCH_LEASE=str(lease)):
                time.sleep(1)  # until the second worker is there
                first.kill()
                killed = time.monotonic()
                wait_until(lambda: len(adapter.marks("hold")) > 1, 3 * lease + 30, "the second run")
                return Sample(adapter.marks("hold")[1][1] - killed)
