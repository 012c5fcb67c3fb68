"""A small web server over a folder that answers byte ranges; stands in for nginx where that is not installed.

Run ``python mini_http.py --root DIR``; it prints its port when it listens, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root = ""
    guard = ""
    """What each request must bring, as ``user:password?query``; "": nothing."""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.guard and not self._is_let_in():
            self._answer(401, {"Content-Length": "0", "WWW-Authenticate": 'Basic realm="test"'})
            return
        path = os.path.normpath(os.path.join(self.root, unquote(urlsplit(self.path).path).lstrip("/")))
        if not path.startswith(self.root + os.sep) or not os.path.isfile(path):
            self._answer(404, {"Content-Length": "0"})
            return
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            start, stop, code = 0, status.st_size, 200
            headers = {"Last-Modified": formatdate(status.st_mtime, usegmt=True), "Accept-Ranges": "bytes",
                       "ETag": f'"{status.st_mtime_ns:x}-{status.st_size:x}"'}  # fmt: skip
            wanted = self.headers.get("If-Match")
            if wanted and wanted != headers["ETag"]:
                self._answer(412, {"Content-Length": "0"})
                return
            spec = self.headers.get("Range", "")
            if spec.startswith("bytes="):
                first, _, last = spec[6:].partition("-")
                start = int(first) if first else max(0, stop - int(last))
                stop = min(stop, int(last) + 1) if first and last else stop
                if start >= status.st_size:
                    self._answer(416, {"Content-Length": "0", "Content-Range": f"bytes */{status.st_size}"})
                    return
                code, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{status.st_size}"
            self._answer(code, {**headers, "Content-Length": str(stop - start)})
            if self.command == "GET":
                while start < stop:
                    start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)

    do_HEAD = do_GET

    def _is_let_in(self) -> bool:
        user, _, query = self.guard.partition("?")
        basic = f"Basic {base64.b64encode(user.encode()).decode()}"
        return self.headers.get("Authorization") == basic and urlsplit(self.path).query == query

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.connection.sendall(f"HTTP/1.1 {status} {self.responses[status][0]}\r\n{lines}\r\n".encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--root", required=True)
    parser.add_argument("--guard", default="")
    args = parser.parse_args()
    Handler.root, Handler.guard = os.path.abspath(args.root), args.guard
    server = Server(("127.0.0.1", args.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
