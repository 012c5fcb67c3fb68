"""The test suite's S3 server (it checks signatures) with the files below a folder as the objects of bucket ``bench``.

``python s3_server.py FOLDER`` prints its port when it listens, and ends when its standard input does.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(_HERE)))
from tests.support.servers.mini_s3 import KEY, REGION, SECRET, Server, State, StoredObject

BUCKET = "bench"


def objects(folder: str) -> dict[str, StoredObject]:
    """Every file below ``folder`` by its relative path; nothing is copied."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            status = os.stat(path)
            etag = hashlib.md5(f"{path} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()
            found[os.path.relpath(path, folder)] = StoredObject(
                path=path, size=status.st_size, etag=f'"{etag}"', modified=status.st_mtime
            )
    return found


def as_store(port: int) -> dict[str, str]:
    """The arguments of a contestant's ``Store``."""
    return {"endpoint": f"http://127.0.0.1:{port}", "bucket": BUCKET, "key": KEY, "secret": SECRET, "region": REGION}


@contextmanager
def serving(folder: str) -> Iterator[dict[str, str]]:
    """A process of this program with ``folder``'s files; how contestants reach it."""
    command = [sys.executable, os.path.abspath(__file__), folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield as_store(int(server.stdout.readline()))
        finally:
            server.stdin.close()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="peers-s3-") as uploads:
        server = Server("127.0.0.1", 0, State(root=uploads, buckets={BUCKET: objects(sys.argv[1])}))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
