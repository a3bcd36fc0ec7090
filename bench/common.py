"""The workloads that every engine runs, each through the same commands of its adapter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from statistics import median

from bench.engine import Adapter, Engine, WorkerProcess
from bench.floor import BATCHED, COPY, INSERT, STATE_BATCHED, STATE_ONE
from bench.lab import Case, Lab, Sample, percentile, wait_until
from bench.meter import Meter

PACE = 0.03
"""Seconds between two tasks, or signals, whose latency is measured: long enough to be idle again."""

_SLOWEST = 300.0


def cases(lab: Lab, engine: Engine, interpreter: Sequence[str]) -> Iterator[Case]:
    """Give the cases of one engine."""
    adapter = partial(adapted, lab, engine, interpreter)
    # A slow engine gets fewer tasks, so that the whole run ends: its rate does not depend on it.
    slow = min(1.0, engine.reference.get("drain", 20_000) / 5_000)
    tasks = int(lab.size(20_000, 10_000) * slow)
    slow_steps = 1.0 if engine.name == "leasetask" else 0.3
    run_steps = int(lab.size(1_000, 1_000) * slow_steps)
    long = lab.size(10_000, 4_000) if engine.name == "leasetask" else 1_000
    yield Case("drain", engine.name, "tasks/s", lambda: drain(lab, adapter, "noop", tasks), BATCHED)
    if "steps" in engine.able:
        run = partial(drain, lab, adapter, "steps", run_steps, units=10)
        yield Case("steps", engine.name, "steps/s", run, STATE_BATCHED)
        yield Case(
            "long task", engine.name, "steps/s", lambda: long_task(lab, adapter, long), STATE_ONE
        )
    one = lab.size(2_000, 1_000)
    many = int(lab.size(20_000, 10_000) * slow)
    yield Case(
        "enqueue one by one",
        engine.name,
        "tasks/s",
        lambda: enqueue(lab, adapter, "single", one),
        INSERT,
    )
    yield Case(
        "enqueue many", engine.name, "tasks/s", lambda: enqueue(lab, adapter, "enqueue", many), COPY
    )
    n = lab.size(300, 60)
    yield Case("pick-up", engine.name, "ms", lambda: pick_up(lab, adapter, n))
    if "signal wake" in engine.able:
        yield Case("signal wake", engine.name, "ms", lambda: signal_wake(lab, adapter, n))


@contextmanager
def adapted(lab: Lab, engine: Engine, interpreter: Sequence[str]) -> Iterator[tuple[str, Adapter]]:
    """Give an engine's adapter on a database of its own, set up."""
    with lab.database() as dsn, Adapter(engine, interpreter, dsn) as adapter:
        adapter.ask("setup")
        yield dsn, adapter


Adapted = Callable[[], AbstractContextManager[tuple[str, Adapter]]]


def drain(
    lab: Lab,
    adapted: Adapted,
    kind: str,
    n: int,
    *,
    units: int = 1,
    prepare: Callable[[str], object] | None = None,
    watch: Callable[[Adapter], Callable[[], bool]] | None = None,
    workers: int = 1,
    **variables: str,
) -> Sample:
    """Let workers drain n tasks: from the first handler's start until none is left.

    Args:
        units: of work in each task.
        prepare: changes the database before the tasks are enqueued.
        watch: gives the function that tells whether all are done, for databases in which counting
            what is left would cost much.
    """
    with adapted() as (dsn, adapter), Meter(lab.server, dsn) as meter:
        if prepare is not None:
            prepare(dsn)
        adapter.ask("enqueue", kind, n)
        meter.value("/* observer */ select count(*) from (select pg_stat_statements_reset()) r")
        settle(adapter)
        done = watch(adapter) if watch is not None else partial(none_left, adapter)
        rows = meter.rows()
        processes = [adapter.start(**variables) for _ in range(workers)]
        try:
            wait_until(lambda: alive(processes) and adapter.marks("first"), 60, "the first task")
            began = meter.read([p.pid for p in processes])
            wait_until(lambda: alive(processes) and done(), _SLOWEST, "the last task")
            ended = meter.read([p.pid for p in processes])
        finally:
            for process in processes:
                process.stop()
        total = n * units
        costs = began.until(ended, total) | rows.until(meter.rows(), total)
        return Sample(total / (ended.at - began.at), costs)


def alive(processes: Sequence[WorkerProcess]) -> bool:
    """Raise if a worker has ended; else true."""
    for process in processes:
        process.check_alive()
    return True


def none_left(adapter: Adapter) -> bool:
    """Look, at most some fifty times a second, whether all tasks are done."""
    time.sleep(0.015)
    return adapter.tasks_left() == 0


def settle(adapter: Adapter) -> None:
    """Leave the same state behind for every engine: vacuumed, analyzed, checkpointed."""
    adapter.conn.execute("/* observer */ vacuum analyze")
    adapter.conn.execute("/* observer */ checkpoint")


def long_task(lab: Lab, adapted: Adapted, steps: int) -> Sample:
    """One task whose steps come one after another; and how its end compares with its beginning."""
    with adapted() as (dsn, adapter), Meter(lab.server, dsn) as meter:
        adapter.ask("enqueue", "long", steps)
        rows = meter.rows()
        with adapter.start() as process:
            wait_until(lambda: alive([process]) and adapter.marks("first"), 60, "the first step")
            began = meter.read([process.pid])
            wait_until(lambda: alive([process]) and none_left(adapter), _SLOWEST, "the last step")
            ended = meter.read([process.pid])
        costs = began.until(ended, steps) | rows.until(meter.rows(), steps)
        at = {word: adapter.marks(word)[0][1] for word in ("step-0", "step-100", "step--100")}
        last = max(at for _, at in adapter.marks("step-0"))
        ratio = (last - at["step--100"]) / (at["step-100"] - at["step-0"])
        return Sample(steps / (last - at["step-0"]), costs, {"last_100_to_first_100": ratio})


def enqueue(lab: Lab, adapted: Adapted, command: str, n: int) -> Sample:
    """Enqueue from one connection, nobody working."""
    with adapted() as (dsn, adapter), Meter(lab.server, dsn) as meter:
        rows, began = meter.rows(), meter.read()
        seconds = adapter.ask(command, "noop", n)
        ended = meter.read()
        costs = began.until(ended, n) | rows.until(meter.rows(), n)
        del costs["client_us"]  # the process was gone before it could be read
        return Sample(n / seconds, costs)


def pick_up(lab: Lab, adapted: Adapted, n: int) -> Sample:
    """From the call of enqueue, one at a time, to the handler's start, in an idle worker."""
    with adapted() as (_, adapter):
        with adapter.start() as process:
            began = warmed(adapter, lambda k: adapter.ask("paced", "pick", k, PACE), n)
            wait_until(
                lambda: alive([process]) and len(adapter.marks("pick")) >= n, 60, "the last task"
            )
        return latencies(adapter.marks("pick"), began)


def signal_wake(lab: Lab, adapted: Adapted, n: int) -> Sample:
    """From the call that signals, one at a time, to the waiting handler's going on."""
    with adapted() as (_, adapter):
        adapter.ask("enqueue", "wait", n)
        with adapter.start() as process:
            time.sleep(3)  # until all wait
            began = adapter.ask("signal", n, PACE)
            wait_until(
                lambda: alive([process]) and len(adapter.marks("woken")) >= n, 60, "the last signal"
            )
        return latencies(adapter.marks("woken"), began)


def warmed(adapter: Adapter, enqueue: Callable[[int], list[float]], n: int) -> list[float]:
    """Enqueue a few to warm the worker up, then the n that count."""
    enqueue(5)
    wait_until(lambda: len(adapter.marks("pick")) >= 5, 60, "the first tasks")
    time.sleep(1.5)
    adapter.forget_marks()
    return enqueue(n)


def latencies(marks: list[tuple[int, float]], began: list[float]) -> Sample:
    """Compare when each was begun with when it was noted."""
    seen = dict(marks)
    times = [(seen[i] - at) * 1000 for i, at in enumerate(began)]
    return Sample(median(times), detail={"p99": percentile(times, 0.99)})
