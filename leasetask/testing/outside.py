"""Lets handlers in another process reach the test's world, which stays in the test's own.

Calls and attribute reads travel over a socket, one at a time, pickled: enough for a fake of an
outside service. `Served` is the world's side, `Proxy` the handler's.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any


class Served:
    """Serves one world after another to whoever connects, until closed."""

    def __init__(self) -> None:
        self.world: Any = None
        self.key = secrets.token_bytes(16)
        self._listener = Listener(authkey=self.key)
        self._closed = False
        threading.Thread(target=self._accept, name="leasetask-world", daemon=True).start()

    @property
    def address(self) -> Any:
        """Where to connect."""
        return self._listener.address

    def close(self) -> None:
        """Serve no longer."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except Exception:  # closed, or somebody without the key
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    name, arguments = connection.recv()
                except (EOFError, OSError):  # the process has died, as it should
                    return
                connection.send(self._answer(name, arguments))

    def _answer(self, name: str, arguments: tuple[Any, Any] | None) -> tuple[str, Any]:
        try:
            value = getattr(self.world, name)
            if arguments is not None:
                return ("value", value(*arguments[0], **arguments[1]))
            return ("method", None) if callable(value) else ("value", value)
        except Exception as error:
            return ("error", error)


class Proxy:
    """Stands for the world in another process."""

    def __init__(self, address: Any, key: bytes) -> None:
        self.__connection = Client(address, authkey=key)
        self.__lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        kind, value = self.__ask(name, None)
        return self.__method(name) if kind == "method" else value

    def __method(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.__ask(name, (args, kwargs))[1]

    def __ask(self, name: str, arguments: tuple[Any, Any] | None) -> tuple[str, Any]:
        with self.__lock:
            self.__connection.send((name, arguments))
            kind, value = self.__connection.recv()
        if kind == "error":
            raise value
        return kind, value
