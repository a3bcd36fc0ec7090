"""The soak: random faults on workers, network and servers under load, judged from outside.

    make soak                     10 minutes
    make soak MINUTES=60 SEED=7   longer, or a failing seed once more

The judge reads the ledger that the handlers write, the business table and the fake outside only, never
the engine's own state. Exit status 1 unless nothing was lost and nothing doubled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psycopg
from network import Proxy
from servers import Pair, a_pair, dsn_of
from support import APPS, Entry, Ledger, Nursery, is_alive, wait_until

from leasetask import schema

LEASE = 2.0
WORKERS = 3
RATE = 25.0
"""Tasks enqueued in a second."""

PER_MINUTE = {
    "kill -9": 100.0,
    "freeze": 5.0,
    "backend killed": 5.0,
    "network cut": 5.0,
    "network frozen": 1.0,
    "acknowledgement lost": 5.0,
    "server restart": 2.0,
    "failover": 2.0,
}
"""Faults in a minute, by kind: in ten minutes those that the project promises to survive."""

NAMES = ("leasetask commit", "leasetask claim", "leasetask transaction", "leasetask heartbeat")
"""Connections whose answers are lost, or whose backends are killed."""

SLEEPS = 4
"""Every so-manyeth task of apps/soaked.py sleeps."""

BUSINESS = "create table business (number int not null, what text not null)"


@dataclass
class Report:
    """What a soak came to; times in seconds."""

    seed: int
    seconds: float
    tasks: int = 0
    tasks_per_second: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recovered: int = 0
    recovery_p50: float = 0.0
    recovery_p95: float = 0.0
    recovery_max: float = 0.0
    lost: list[int] = field(default_factory=list)
    steps_run_again: list[str] = field(default_factory=list)
    business_doubled: list[str] = field(default_factory=list)
    effects_doubled: list[int] = field(default_factory=list)
    doubled_inside_a_frozen_do: int = 0

    @property
    def passed(self) -> bool:
        return not (
            self.lost or self.steps_run_again or self.business_doubled or self.effects_doubled
        )

    def __str__(self) -> str:
        faults = ", ".join(f"{n} {kind}" for kind, n in sorted(self.faults.items()))
        return "\n".join(
            [
                f"seed                     {self.seed}, {self.seconds:.0f} s",
                f"load held                {self.tasks} tasks, {self.tasks_per_second:.1f}/s",
                f"faults                   {faults}",
                f"recovered                {self.recovered} tasks of killed workers, p50 "
                f"{self.recovery_p50:.1f} s, p95 {self.recovery_p95:.1f} s, max "
                f"{self.recovery_max:.1f} s (lease {LEASE:.0f} s)",
                f"tasks lost               {len(self.lost)} {self.lost[:10] or ''}",
                f"recorded steps run again {len(self.steps_run_again)} {self.steps_run_again[:10] or ''}",
                f"business rows doubled    {len(self.business_doubled)} {self.business_doubled[:10] or ''}",
                f"effects doubled          {len(self.effects_doubled)} {self.effects_doubled[:10] or ''}",
                f"apart                    {self.doubled_inside_a_frozen_do} doubled by a process that "
                "was frozen or cut off inside `do`",
            ]
        )


class Load:
    """Enqueues numbers one by one, each until it is acknowledged, whatever the servers do."""

    def __init__(self, dsn: str) -> None:
        self.acknowledged: list[int] = []
        self._dsn = dsn
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._produce)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _produce(self) -> None:
        conn: psycopg.Connection | None = None
        number = 0
        while not self._stopped.wait(1 / RATE):
            try:
                if conn is None:
                    conn = psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None)
                conn.execute(
                    "select leasetask.enqueue('order', to_jsonb(%s::int), %s)",
                    [number, str(number)],
                )
            except psycopg.Error:
                if conn is not None:
                    conn.close()
                conn = None
                continue
            self.acknowledged.append(number)
            number += 1
        if conn is not None:
            conn.close()


class Workers:
    """Three workers, always, as a supervisor keeps them: one that finds no server ends at its start."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self.alive: list[int] = []
        self.killed: list[tuple[float, int]] = []
        self.frozen: list[tuple[int, float, float]] = []
        while len(self.alive) < WORKERS:
            self.start()

    def start(self) -> None:
        options = ("-c", "8", "--lease", str(LEASE), "--poll", "0.2", "--grace", "5")
        self.alive.append(self._nursery.fork(0, *options))

    def tend(self) -> None:
        """Start others in the place of those that have ended by themselves."""
        self.alive = [pid for pid in self.alive if is_alive(pid)]
        while len(self.alive) < WORKERS:
            self.start()

    def kill(self, rng: random.Random) -> None:
        """Kill one, and start another."""
        self.tend()
        pid = self.alive.pop(rng.randrange(len(self.alive)))
        self.killed.append((time.monotonic(), pid))
        os.kill(pid, signal.SIGKILL)
        self.start()

    def freeze(self, rng: random.Random, hold: Callable[[float], None]) -> None:
        """Stop one past its lease, and let it go on."""
        self.tend()
        pid = rng.choice(self.alive)
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        hold(LEASE * rng.uniform(1.2, 2))
        os.kill(pid, signal.SIGCONT)
        self.frozen.append((pid, began, time.monotonic()))

    def stop(self) -> None:
        """Let them drain."""
        self.tend()
        for pid in self.alive:
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(map(is_alive, self.alive)), 30, "for the workers to end")


class Soak:
    """One run: the stage, the faults, the judgement."""

    def __init__(self, pair: Pair, folder: Path, outside: str, seed: int) -> None:
        self._pair = pair
        self._rng = random.Random(seed)
        self._outside = outside
        self._proxies = [Proxy(pair.primary.port), Proxy(pair.standby.port)]
        self._through = dsn_of(*(proxy.port for proxy in self._proxies))
        self._direct = dsn_of(pair.primary.port, pair.standby.port)
        schema.migrate(self._direct)
        with psycopg.connect(self._direct) as conn:
            conn.execute(BUSINESS)
        self._ledger = Ledger(folder / "ledger")
        self._nursery = Nursery(self._through, self._ledger.path, outside, "soaked")
        self._cut: list[tuple[float, float]] = []
        self.log = folder / "ledger.log"
        self.report = Report(seed, 0.0)

    def run(self, seconds: float, most: dict[str, float]) -> Report:
        """Inject faults for so long, then let everything end, and judge."""
        workers, load = Workers(self._nursery), Load(self._through)
        began = time.monotonic()
        try:
            try:
                self._inject(workers, began + seconds, most)
                self.report.seconds = time.monotonic() - began
            finally:
                load.stop()
            self._wait_for_the_end(load.acknowledged, workers)
            took = time.monotonic() - began
            workers.stop()
        finally:
            self._nursery.close()
            for proxy in self._proxies:
                proxy.close()
        self.report.tasks = len(load.acknowledged)
        self.report.tasks_per_second = len(load.acknowledged) / took
        self._judge(load.acknowledged, workers)
        return self.report

    def _inject(self, workers: Workers, until: float, most: dict[str, float]) -> None:
        """Faults come one after another, each kind with its own rate."""
        due = {kind: time.monotonic() + self._pause(rate) / 3 for kind, rate in most.items()}
        actions: dict[str, Callable[[], None]] = {
            "kill -9": lambda: workers.kill(self._rng),
            "freeze": lambda: workers.freeze(self._rng, _hold),
            "backend killed": self._kill_backends,
            "network cut": lambda: [proxy.reset() for proxy in self._proxies] and None,
            "network frozen": self._freeze_network,
            "acknowledgement lost": self._lose_answer,
            "server restart": self._restart,
            "failover": self._fail_over,
        }
        while time.monotonic() < until:
            kind = min(due, key=lambda name: due[name])
            _hold(min(until, due[kind]) - time.monotonic())
            if time.monotonic() >= until:
                return
            actions[kind]()
            self.report.faults[kind] += 1
            # From when it was due: what took long must not thin the others out.
            due[kind] = max(due[kind], time.monotonic() - 5) + self._pause(most[kind])

    def _pause(self, per_minute: float) -> float:
        return self._rng.uniform(0.5, 1.5) * 60 / per_minute

    def _freeze_network(self) -> None:
        began = time.monotonic()
        for proxy in self._proxies:
            proxy.freeze()
        _hold(LEASE * self._rng.uniform(0.5, 1.5))
        for proxy in self._proxies:
            proxy.thaw()
        self._cut.append((began, time.monotonic()))

    def _lose_answer(self) -> None:
        name = self._rng.choice(NAMES)
        for proxy in self._proxies:
            proxy.lose_answer(name)

    def _kill_backends(self) -> None:
        self._pair.primary.end_backends(self._rng.choice(NAMES))

    def _restart(self) -> None:
        self._pair.primary.stop("immediate")
        self._pair.primary.start()

    def _fail_over(self) -> None:
        self._pair.fail_over()
        _hold(self._rng.uniform(0.2, 1.0))
        self._pair.rebuild()

    def _wait_for_the_end(self, numbers: list[int], workers: Workers) -> None:
        def ended() -> bool:
            workers.tend()
            try:
                with psycopg.connect(self._direct) as conn:
                    query = "select count(distinct number) from business where what = 'ended'"
                    return conn.execute(query).fetchone() == (len(numbers),)
            except psycopg.Error:
                return False

        with suppress(AssertionError):  # the judge names what is missing
            wait_until(ended, 180)

    # --- judging --------------------------------------------------------------------------------

    def _judge(self, numbers: list[int], workers: Workers) -> None:
        report, entries = self.report, self._ledger.entries()
        with psycopg.connect(self._direct) as conn:
            rows = Counter(conn.execute("select number, what from business").fetchall())
        report.lost = [n for n in numbers if not rows[n, "booked"] or not rows[n, "ended"]]
        report.business_doubled = [f"{n} {what}" for (n, what), times in rows.items() if times > 1]
        report.steps_run_again = self._steps_run_again(entries, workers)
        self._judge_effects(entries, workers)
        times = sorted(_recoveries(entries, workers.killed))
        if times:
            report.recovered = len(times)
            report.recovery_p50 = times[len(times) // 2]
            report.recovery_p95 = times[int(len(times) * 0.95)]
            report.recovery_max = times[-1]

    def _steps_run_again(self, entries: list[Entry], workers: Workers) -> list[str]:
        recorded: set[str] = set()
        again = []
        for entry in entries:
            word, _, step = entry.what.partition(" ")
            if word == "recorded":
                recorded.add(step)
            elif (
                word == "body"
                and step in recorded
                and not _stood(entry, entry.at, workers, self._cut)
            ):
                again.append(step)
        return again

    def _judge_effects(self, entries: list[Entry], workers: Workers) -> None:
        with urllib.request.urlopen(f"{self._outside}/list") as answer:
            sent = Counter(json.load(answer))
        inside: dict[int, list[tuple[Entry, float]]] = defaultdict(list)
        open_: dict[tuple[int, int], Entry] = {}
        for entry in entries:
            word, _, number = entry.what.partition(" ")
            if word == "do":
                open_[entry.pid, int(number)] = entry
            elif word == "done":
                began = open_.pop((entry.pid, int(number)))
                inside[int(number)].append((began, entry.at))
        for name, times in sent.items():
            if times > 1:
                number = int(name[1:])
                if any(_stood(began, end, workers, self._cut) for began, end in inside[number]):
                    self.report.doubled_inside_a_frozen_do += 1
                else:
                    self.report.effects_doubled.append(number)


def _stood(
    entry: Entry, end: float, workers: Workers, cuts: list[tuple[float, float]], slack: float = 0.05
) -> bool:
    """Whether a process stood still, or was cut off, between an entry of its own and a moment."""
    stops = [(began, over) for pid, began, over in workers.frozen if pid == entry.pid] + cuts
    return any(began <= end + slack and over >= entry.at - slack for began, over in stops)


def _recoveries(entries: list[Entry], killed: list[tuple[float, int]]) -> Iterator[float]:
    """Give, for each task that a killed worker had begun, the time until it went on elsewhere.

    Those that sleep are left out: they go on elsewhere by themselves.
    """
    at = {pid: moment for moment, pid in killed}
    last: dict[str, Entry] = {}
    for entry in entries:
        word, _, number = entry.what.partition(" ")
        if word == "begin":
            before = last.get(number)
            if (
                before is not None
                and int(number) % SLEEPS
                and entry.at > at.get(before.pid, entry.at)
            ):
                yield entry.at - at[before.pid]
            last[number] = entry


def _hold(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


@contextmanager
def outside() -> Iterator[str]:
    """Give the address of a fake torrent client in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, str(APPS / "torrents.py")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def soak(seconds: float, seed: int, most: dict[str, float] = PER_MINUTE) -> Report:
    """Run one; a report that did not pass leaves the ledger and the workers' log behind."""
    folder = Path(tempfile.mkdtemp(prefix="leasetask-soak-"))
    with a_pair() as pair, outside() as address:
        run = Soak(pair, folder, address, seed)
        report = run.run(seconds, most)
    if not report.passed:
        print(f"the ledger, and the workers' log: {folder}", file=sys.stderr)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, help="a folder for the dated result")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    report = soak(asked.minutes * 60, seed)
    print(report)
    if asked.out is not None:
        now = datetime.now(UTC)
        file = asked.out / f"{now:%Y%m%dT%H%M}-soak.json"
        asked.out.mkdir(exist_ok=True)
        about = {"date": now.isoformat(timespec="seconds"), "cores": os.cpu_count(),
                 "python": platform.python_version(), "lease": LEASE, "passed": report.passed}  # fmt: skip
        faults = {"faults": dict(report.faults)}  # asdict makes pairs of a Counter's keys
        file.write_text(json.dumps({**about, **asdict(report), **faults}, indent=1) + "\n")
        print(file)
    sys.exit(0 if report.passed else 1)


if __name__ == "__main__":
    main()
