"""A TCP proxy that misbehaves when it is told to: freezes, resets, or loses an acknowledgement."""

from __future__ import annotations

import re
import socket
import struct
import threading
from contextlib import suppress
from types import TracebackType

from servers import free_port

READY = b"Z\x00\x00\x00\x05"
"""How the server's last message of an answer begins: what was asked is done, and committed."""

_NAME = re.compile(rb"application_name\x00([^\x00]*)\x00")


class Proxy:
    """Stands before one port of loopback."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self.lost_answers = 0
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._frozen = ""
        self._loses: str | None = None
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    # --- what it can do to those who talk through it ------------------------------------------

    def freeze(self, name: str = "") -> None:
        """Pass nothing on any more, and close nothing: no end notices but by waiting.

        Args:
            name: of connections with this application name, also new ones; all by default.
        """
        self._frozen = name
        self._flows.clear()

    def thaw(self) -> None:
        """Pass on again, also what came meanwhile."""
        self._flows.set()

    def reset(self, name: str = "") -> int:
        """Cut connections off at both ends; those with this application name, or all."""
        with self._lock:
            cut = [link for link in self._links if name in ("", link.name)]
        for link in cut:
            link.reset()
        return len(cut)

    def lose_answer(self, name: str) -> None:
        """Cut off the next connection of this name whose answer is complete, and keep the answer."""
        self._loses = name

    def close(self) -> None:
        """Stand no more."""
        self._flows.set()
        self._listener.close()
        self.reset()

    # --- passing on ---------------------------------------------------------------------------

    def passes(self, link: _Link, data: bytes) -> bool:
        """Whether an answer of the server may go on."""
        self._wait(link)
        # What ends in ReadyForQuery outside a transaction has been committed.
        if self._loses is not None and self._loses == link.name and data[-6:-1] == READY:
            if data[-1:] != b"I":
                return True
            self._loses = None
            self.lost_answers += 1
            link.reset()
            return False
        return True

    def asks(self, link: _Link, data: bytes) -> None:
        """Learn a connection's name from its start."""
        if not link.name and (found := _NAME.search(data)):
            link.name = found[1].decode()
        self._wait(link)

    def _wait(self, link: _Link) -> None:
        if self._frozen in ("", link.name):
            self._flows.wait()

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                _cut_off(client)
                continue
            server.settimeout(None)
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
            link.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.name = ""
        self._proxy = proxy
        self._client = client
        self._server = server

    def start(self) -> None:
        for pump in (self._ask, self._answer):
            threading.Thread(target=pump, daemon=True).start()

    def reset(self) -> None:
        for end in (self._client, self._server):
            _cut_off(end)

    def _ask(self) -> None:
        with suppress(OSError):
            while data := self._client.recv(65536):
                self._proxy.asks(self, data)
                self._server.sendall(data)
        self._end()

    def _answer(self) -> None:
        with suppress(OSError):
            while data := self._server.recv(65536):
                if not self._proxy.passes(self, data):
                    break
                self._client.sendall(data)
        self._end()

    def _end(self) -> None:
        for end in (self._client, self._server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._proxy.forget(self)


def _cut_off(end: socket.socket) -> None:
    """Close with a reset, as a router does that has forgotten the connection."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    end.close()
