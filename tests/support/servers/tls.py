"""Serve one object over TLS, with certificates of any kind."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


def openssl(*arguments: str, cwd: Path | None = None) -> None:
    """Run the program; skip the test where there is none."""
    try:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=cwd)
    except FileNotFoundError:
        pytest.skip("no openssl program here")


def self_signed(folder: Path, name: str, *extensions: str) -> tuple[Path, Path]:
    """Make a key and a certificate for it, as ``openssl req -x509`` does; return the certificate, and the key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    more = [word for one in extensions for word in ("-addext", one)]
    make = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}")
    openssl(*make, *more, "-keyout", str(key), "-out", str(cert))
    return cert, key


@contextmanager
def served_over_tls(body: bytes, cert: Path, key: Path) -> Iterator[str]:
    """Serve ``body`` under any path of the URL that is yielded, on localhost."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            spec = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = (int(spec[1]), min(int(spec[2]), len(body) - 1)) if spec else (0, len(body) - 1)
            self.send_response(206 if spec else 200)
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("ETag", '"1"')
            if spec:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[first : last + 1])

        do_HEAD = do_GET

    class Server(ThreadingHTTPServer):
        daemon_threads = False

        def handle_error(self, *_: object) -> None:  # a client that hangs up over the certificate
            pass

        def finish_request(self, request: Any, address: Any) -> None:
            with context.wrap_socket(request, server_side=True) as secure:
                kept_open.append(secure)
                super().finish_request(secure, address)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    kept_open: list[ssl.SSLSocket] = []
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://localhost:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    for one in kept_open:
        with suppress(OSError):  # the client has closed it
            one.shutdown(socket.SHUT_RDWR)
    server.server_close()
