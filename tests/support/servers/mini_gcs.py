"""A small Google Cloud Storage for tests, on loopback only: the part of its XML API that loaders and writers use.

That API is close to S3's, so this is mini_s3.py with what differs: a bearer token in place of signatures, generations
of objects (in the header ``x-goog-generation``, asked for with ``x-goog-if-generation-match``), and 404 for the removal
of what is not there. The rest of mini_s3.py holds here too: buckets ``public-…`` and ``locked-…``, ``GET /_log``.

Run ``python mini_gcs.py --root DIR``; it prints its port when it listens, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading

from tests.support.servers.mini_s3 import Handler, Refused, Server, State, StoredObject

TOKEN = "mini-token"
CONDITIONS = threading.Lock()
"""Held from the comparison of a generation to the write, so that of two writers of one generation one wins."""


def generation(stored: StoredObject) -> str:
    """The number of this version of an object: larger for later ones."""
    return str(int(stored.modified * 1e6))


class GcsHandler(Handler):
    def _authorize(self, raw_path: str, bucket: str) -> None:
        given = self.headers.get("Authorization")
        if given is None:
            if bucket.startswith("public-") and self.command in {"GET", "HEAD"}:
                return
            raise Refused(403, "AccessDenied", "Anonymous caller does not have storage.objects.get access")
        if given != f"Bearer {self.server.state.key}":
            raise Refused(401, "AuthenticationRequired", "Authentication required.")

    def _dispatch(self, bucket: str, key: str) -> None:
        has_condition = self.headers.get("x-goog-if-generation-match") is not None
        with CONDITIONS if has_condition else contextlib.nullcontext():
            self._compared(bucket, key)

    def _compared(self, bucket: str, key: str) -> None:
        objects = self.server.state.buckets.get(bucket)
        if objects is not None and key and not bucket.startswith("locked-") and "uploadId" not in self.query:
            stored = objects.get(key)
            wanted = self.headers.get("x-goog-if-generation-match")
            if wanted not in {None, "0" if stored is None else generation(stored)}:
                raise Refused(412, "PreconditionFailed", "The generation is not the one asked for.")
            if self.command == "DELETE" and stored is None:
                raise Refused(404, "NoSuchKey", "The specified key does not exist.")
        super()._dispatch(bucket, key)

    def _head(self, status: int, headers: dict[str, str]) -> bytes:
        if self.answered is not None and "ETag" in headers:  # both of the same version of the object
            headers = {**headers, "x-goog-generation": generation(self.answered), "x-goog-metageneration": "1"}
        return super()._head(status, headers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--root", required=True)
    parser.add_argument("--token", default=TOKEN)
    args = parser.parse_args()
    os.makedirs(args.root, exist_ok=True)
    server = Server("127.0.0.1", args.port, State(root=args.root, key=args.token), GcsHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.buffer.read()  # ends with the parent, however that ends


if __name__ == "__main__":
    main()
