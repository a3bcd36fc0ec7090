"""A small torrent client, run as a process of its own: it takes what it is given, every time.

POST /add?name=… appends to its list, without looking; GET /list tells what it has, GET /has?name=…
whether something is there.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

added: list[str] = []
known: set[str] = set()
lock = threading.Lock()


class Client(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        name = parse_qs(urlparse(self.path).query)["name"][0]
        with lock:
            added.append(name)
            known.add(name)
        self._answer(name)

    def do_GET(self) -> None:
        asked = urlparse(self.path)
        with lock:
            if asked.path == "/has":
                self._answer(parse_qs(asked.query)["name"][0] in known)
            else:
                self._answer(list(added))

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # who asked may have been killed
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


server = ThreadingHTTPServer(("127.0.0.1", 0), Client)
print(server.server_address[1], flush=True)
sys.stdout.close()
server.serve_forever()
