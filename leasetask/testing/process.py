"""A worker in a process of its own, which really is killed or frozen at a point.

The parent starts it with an order on its standard input; it imports the App by its name, works on
the same scratch database, and tells what it came to on a pipe, just before it sends itself SIGKILL
or SIGSTOP, and when it has nothing left to do.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast

from leasetask.app import App
from leasetask.errors import ConfigurationError
from leasetask.loading import load_app
from leasetask.testing.engine import Engine
from leasetask.testing.outside import Proxy, Served
from leasetask.testing.probe import Event, Hit, Log, Point, Probe, Script, Verb
from leasetask.testing.schedule import Fault, in_words, parse

_PATIENCE = 60.0
"""Real seconds that a process may take to its end."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a child is told.

    Attributes:
        app: `module:attribute`.
        path: the parent's sys.path.
        fault: the fault that ends it, as text.
        world: where the world is served, its key in hex, and the `module:attribute` it stands at.
    """

    app: str
    kind: str
    path: list[str]
    dsn: str
    name: str
    fault: str
    world: tuple[Any, str, str] | None


@dataclass(slots=True)
class Told:
    """What a child came to since it last told."""

    points: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    verbs: dict[str, str] = field(default_factory=dict)
    late_bound: dict[str, str] = field(default_factory=dict)
    stopped_by: str | None = None


# --- the parent's side -------------------------------------------------------------------------


class Processes:
    """Starts workers in processes of their own, for one App, task and world.

    Raises:
        ConfigurationError: no other process can import the App.
    """

    def __init__(self, app: App, task: Callable[..., Any] | str, world_at: str | None) -> None:
        spec = app._import_spec()
        if spec is None:
            raise ConfigurationError(
                'mode="process" needs an App that another process can import: one that stands in a '
                "module under a name, with its tasks"
            )
        self._app = spec
        self._kind = app.registry.resolve(task).name
        self._world_at = world_at
        self.served = Served() if world_at is not None else None

    def start(self, dsn: str, name: str, fault: Fault, log: Log) -> Child:
        """Start a worker that a crash or a freeze will meet."""
        world = None
        if self.served is not None and self._world_at is not None:
            world = (self.served.address, self.served.key.hex(), self._world_at)
        path = [str(Path(place).resolve()) for place in sys.path]
        return Child(Order(self._app, self._kind, path, dsn, name, str(fault), world), log)

    def close(self) -> None:
        """Serve the world no longer."""
        if self.served is not None:
            self.served.close()


class Child:
    """A worker process, as the harness sees it."""

    def __init__(self, order: Order, log: Log) -> None:
        self.name = order.name
        self.points: list[Point] = []
        self.stopped_by: Fault | None = None
        self._log = log
        reader, writer = os.pipe()
        self._from = Connection(reader, writable=False)
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", str(writer)],
            stdin=subprocess.PIPE,
            pass_fds=[writer],
        )
        os.close(writer)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(json.dumps(asdict(order)).encode())

    def wait(self) -> str | None:
        """Wait until it has died, stands still, or has ended; returns what is wrong, if anything."""
        if not self._from.poll(_PATIENCE):
            self.end()
            return f"{self.name} hangs: its process came to nothing for {_PATIENCE:.0f} s"
        try:
            self._take(Told(**json.loads(self._from.recv_bytes())))
        except EOFError:
            code = self._process.wait()
            raise ConfigurationError(
                f"the process of {self.name} ended by itself, with status {code}; what it wrote "
                "to its standard error says why"
            ) from None
        status = self._wait_for_status()
        expected = {"crash": -signal.SIGKILL, "zombie": "stopped"}
        if self.stopped_by is not None and status != expected[self.stopped_by.kind]:
            return f"{self.name} should have stopped, and has status {status}"
        return None

    def wake(self) -> None:
        """Let a frozen one go on."""
        self.stopped_by = None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Leave no process behind."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._from.close()

    def _take(self, told: Told) -> None:
        start = len(self.points)
        self.points += [Point(*point) for point in told.points]
        for worker, point in told.events:
            self._log.events.append(Event(worker, Point(*point)))
            if point[0] == "in":
                self._log.bodies[Point(*point)] += 1
        self._log.verbs |= cast("dict[str, Verb]", told.verbs)
        self._log.late_bound |= told.late_bound
        if told.stopped_by is not None:
            (self.stopped_by,) = parse(told.stopped_by)
            place = start + len(told.points) - 1
            self._log.hits.append(Hit(self.stopped_by, self.name, place))

    def _wait_for_status(self) -> int | Literal["stopped"]:
        """Wait for the process to end or to be stopped, whichever comes."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._process.pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status):
                return "stopped"
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                return self._process.returncode
            time.sleep(0.002)
        self.end()
        return 0


# --- the child's side --------------------------------------------------------------------------


class _MortalProbe(Probe):
    """Ends or freezes its own process."""

    tell: Any

    def stop(self, fault: Fault) -> None:
        """Tell what there is to tell, and stop."""
        self.stopped_by = fault
        self.tell(str(fault))
        # To this thread: the process's main thread might take a SIGSTOP later than this one goes on.
        word = signal.SIGKILL if fault.kind == "crash" else signal.SIGSTOP
        signal.pthread_kill(threading.get_ident(), word)

    def park_thread(self) -> None:
        """It has stood still and goes on."""

    async def park(self) -> None:
        """As well."""


class _Teller:
    """Sends what has been added to the log since the last time."""

    def __init__(self, pipe: Connection, probe: Probe, log: Log) -> None:
        self._pipe = pipe
        self._probe = probe
        self._log = log
        self._points = 0
        self._events = 0

    def tell(self, stopped_by: str | None) -> None:
        """Send it."""
        told = Told(
            points=list(self._probe.points[self._points :]),
            events=list(self._log.events[self._events :]),
            verbs=dict(self._log.verbs),
            late_bound=dict(self._log.late_bound),
            stopped_by=stopped_by,
        )
        self._points, self._events = len(self._probe.points), len(self._log.events)
        self._pipe.send_bytes(json.dumps(asdict(told)).encode())


def main() -> None:
    """Work as the order says."""
    order = Order(**json.load(sys.stdin))
    sys.path[:] = order.path
    app = load_app(order.app)
    app.registry.resolve(order.kind)
    if order.world is not None:
        address, key, place = order.world
        module, _, attribute = place.partition(":")
        proxy = Proxy(address if isinstance(address, str) else tuple(address), bytes.fromhex(key))
        setattr(importlib.import_module(module), attribute, proxy)
    with Engine(app, order.dsn, attach=True) as engine:
        script = Script(parse(order.fault), _nothing)
        hand = engine.hand(order.name, script, _MortalProbe)
        probe = cast("_MortalProbe", hand.probe)
        teller = _Teller(Connection(int(sys.argv[1]), readable=False), probe, script.log)
        probe.tell = teller.tell
        engine.call(hand.drain())
        # One that was frozen has missed its time: what it would skip to is others' work.
        while probe.stopped_by is None and engine.skip():
            engine.call(hand.drain())
        teller.tell(None)


def _nothing(fault: Fault) -> list[Future[Any]]:
    raise AssertionError(f"{in_words((fault,))} needs no process")
