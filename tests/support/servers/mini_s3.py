"""A small S3 server that really checks signatures: for tests, the demo and benchmarks; on loopback only.

It speaks what loaders and writers use: signature version 4 in the header and in the query, ranged and conditional
GET, HEAD, conditional PUT, uploads in parts, ListObjectsV2 with paging and delimiter, DELETE, buckets. Anonymous
requests may read buckets whose names begin with ``public-``, and get (but not list, so that what is not there is
denied) the objects of those that begin with ``unlisted-``; nobody may do anything in those that begin with ``locked-``.
Objects are files (sent by ``sendfile``), their table is in memory and in a journal beside them, so that a
server started again in the same folder has them again.

Unsigned are: ``PUT /_buckets/NAME``, which makes a bucket at once, for those who have no client that signs; ``POST
/_sessions?seconds=60`` (or ``?requests=30``), which makes keys that are good for so long, in the form of a
``credential_process``; ``DELETE /_sessions?key=NAME``, which ends one, and ``GET /_sessions``, which counts them; ``PUT
/_token/NAME``, which changes the key (of mini_gcs.py, the token) that is always good; ``GET /_log``, which returns
every request since the last ``DELETE /_log`` as JSON.

Run ``python mini_s3.py --root DIR``; it prints its port when it listens, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

KEY, SECRET, REGION = "mini-key", "mini-secret", "us-east-1"
_UNSAFE_BODY = ("UNSIGNED-PAYLOAD", "STREAMING-")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    path: str
    size: int
    etag: str
    modified: float


@dataclass(slots=True)
class Line:
    """A line of so many bytes a second that all answers share; 0: as fast as the machine."""

    bytes_per_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at_s: float = 0.0

    def pass_on(self, num_bytes: int) -> None:
        """Return when so many bytes have gone through."""
        with self.lock:
            self.free_at_s = max(self.free_at_s, time.monotonic()) + num_bytes / self.bytes_per_s
            wait_s = self.free_at_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


@dataclass(slots=True)
class Session:
    """Keys that end: at a time of this server's clock, after a number of requests, or never."""

    secret: str
    token: str
    end_s: float | None
    requests: int | None

    def is_over(self) -> bool:
        """Count a request; tell whether it comes too late."""
        if self.requests is not None:
            self.requests -= 1
        return (self.requests is not None and self.requests < 0) or (
            self.end_s is not None and time.time() >= self.end_s
        )


@dataclass(slots=True)
class State:
    root: str
    key: str = KEY
    secret: str = SECRET
    region: str = REGION
    lock: threading.Lock = field(default_factory=threading.Lock)
    buckets: dict[str, dict[str, StoredObject]] = field(default_factory=dict)
    uploads: dict[str, tuple[str, str, dict[int, StoredObject]]] = field(default_factory=dict)
    log: list[dict[str, object]] = field(default_factory=list)
    line: Line = field(default_factory=Line)
    round_trip_s: float = 0.0
    sessions: dict[str, Session] = field(default_factory=dict)
    num_sessions: int = 0

    def begin_session(self, *, seconds: float | None, requests: int | None) -> dict[str, object]:
        """Make keys; what a ``credential_process`` prints of them."""
        key, end_s = f"session-{uuid.uuid4().hex}", None if seconds is None else time.time() + seconds
        made = Session(uuid.uuid4().hex, uuid.uuid4().hex, end_s, requests)
        with self.lock:
            self.sessions[key] = made
            self.num_sessions += 1
        told = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": made.secret, "SessionToken": made.token}
        if end_s is not None:
            told["Expiration"] = f"{datetime.fromtimestamp(end_s, UTC).isoformat()}"
        return told

    def secret_of(self, key: str, token: str | None) -> str:
        """The secret of a key that may be used with this token, now."""
        if key == self.key:
            return self.secret
        with self.lock:
            found = self.sessions.get(key)
            if found is None:
                raise Refused(
                    403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."
                )
            if found.token != token:
                raise Refused(400, "InvalidToken", "The provided token is malformed or otherwise invalid.")
            if found.is_over():
                raise Refused(400, "ExpiredToken", "The provided token has expired.")
        return found.secret

    def note(self, bucket: str, key: str | None = None, stored: StoredObject | None = None) -> None:
        """Write down that a bucket was made, an object stored, or (None) removed; call with the lock held."""
        entry = json.dumps([bucket, key, asdict(stored) if stored is not None else None])
        with open(os.path.join(self.root, "journal"), "a") as file:
            file.write(entry + "\n")

    def remember(self) -> None:
        """Take over what an earlier server in this folder wrote down, but for a line that it did not finish."""
        path = os.path.join(self.root, "journal")
        if not os.path.exists(path):
            return
        with open(path) as file:
            entries = [json.loads(line) for line in file if line.endswith("\n")]
        for bucket, key, stored in entries:
            objects = self.buckets.setdefault(bucket, {})
            if stored is not None:
                objects[key] = StoredObject(**stored)
            elif key is not None:
                objects.pop(key, None)


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str, extra: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message, self.extra = status, code, message, extra


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def signature(secret: str, scope: str, when: str, canonical: str) -> str:
    """The signature of a canonical request; AWS General Reference, "Create a signed AWS API request"."""
    date, region, service, _ = scope.split("/")
    key = _hmac(_hmac(_hmac(_hmac(b"AWS4" + secret.encode(), date), region), service), "aws4_request")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return hmac.new(key, f"AWS4-HMAC-SHA256\n{when}\n{scope}\n{digest}".encode(), hashlib.sha256).hexdigest()


def canonical_query(pairs: list[tuple[str, str]]) -> str:
    return "&".join(f"{a}={b}" for a, b in sorted((quote(a, safe="-_.~"), quote(b, safe="-_.~")) for a, b in pairs))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = 1 << 16
    server: Server
    answered: StoredObject | None = None
    """The object whose headers are sent."""

    def log_message(self, *args: object) -> None:
        pass

    # -- one request ---------------------------------------------------------------------------------------------

    def _handle(self) -> None:
        state = self.server.state
        path, _, query = self.path.partition("?")
        if path == "/_log":
            self._admin()
            return
        if path == "/_sessions":
            self._sessions(dict(parse_qsl(query)))
            return
        if path.startswith("/_token/"):
            state.key = unquote(path).removeprefix("/_token/")
            self.entry = {}
            self._answer(200, b"", {})
            return
        if path.startswith("/_buckets/") and self.command == "PUT":
            self._create(unquote(path).removeprefix("/_buckets/"))
            self.entry = {}
            self._answer(200, b"", {})
            return
        self.pairs = parse_qsl(query, keep_blank_values=True)
        self.query = dict(self.pairs)
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        self.entry = {"method": self.command, "path": unquote(path), "query": sorted(self.query),
                      "range": self.headers.get("Range"), "status": 0, "bytes": 0}  # fmt: skip
        with state.lock:
            state.log.append(self.entry)
        self.body_read, self.answered = False, None
        try:
            self._authorize(path, bucket)
            self._dispatch(bucket, key)
        except Refused as refused:
            self._drain()
            xml = (f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{refused.code}</Code>'
                   f"<Message>{escape(refused.message)}</Message>{refused.extra}</Error>")  # fmt: skip
            self._answer(refused.status, xml.encode(), {"Content-Type": "application/xml"})
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _admin(self) -> None:
        state = self.server.state
        with state.lock:
            body = json.dumps(state.log).encode()
            if self.command == "DELETE":
                state.log.clear()
        self.entry = {}
        self._answer(200, body, {})

    def _sessions(self, asked: dict[str, str]) -> None:
        state, self.entry = self.server.state, {}
        told: object = None
        if self.command == "DELETE":
            with state.lock:
                state.sessions.pop(asked["key"], None)
        elif self.command == "GET":
            told = state.num_sessions
        else:
            seconds, requests = asked.get("seconds"), asked.get("requests")
            told = state.begin_session(
                seconds=float(seconds) if seconds else None, requests=int(requests) if requests else None
            )
        self._answer(200, json.dumps(told).encode(), {})

    def _create(self, bucket: str) -> None:
        state = self.server.state
        with state.lock:
            state.buckets.setdefault(bucket, {})
            state.note(bucket)

    def _dispatch(self, bucket: str, key: str) -> None:  # noqa: C901 (one branch for each operation)
        state, query = self.server.state, self.query
        if not bucket:
            names = "".join(f"<Bucket><Name>{escape(n)}</Name></Bucket>" for n in sorted(state.buckets))
            return self._xml("ListAllMyBucketsResult", f"<Buckets>{names}</Buckets>")
        if not key and self.command == "PUT":
            self._drain()
            self._create(bucket)
            return self._answer(200, b"", {})
        objects = state.buckets.get(bucket)
        if objects is None:
            raise Refused(404, "NoSuchBucket", "The specified bucket does not exist")
        if bucket.startswith("locked-") and "delete" not in query:
            raise Refused(403, "AccessDenied", "Access Denied")
        unlisted = bucket.startswith("unlisted-") and "Authorization" not in self.headers
        if unlisted and (not key or (self.command in {"GET", "HEAD"} and key not in objects)):
            raise Refused(403, "AccessDenied", "Access Denied")
        if not key:
            return self._bucket(bucket, objects)
        if self.command in {"GET", "HEAD"}:
            return self._get(objects, key)
        if self.command == "PUT" and "uploadId" in query:
            return self._put_part(query["uploadId"], int(query["partNumber"]))
        if self.command == "PUT":
            return self._put(bucket, objects, key)
        if self.command == "POST" and "uploads" in query:
            self._drain()
            upload = uuid.uuid4().hex
            with state.lock:
                state.uploads[upload] = (bucket, key, {})
            return self._xml("InitiateMultipartUploadResult", f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
                             f"<UploadId>{upload}</UploadId>")  # fmt: skip
        if self.command == "POST" and "uploadId" in query:
            return self._complete(bucket, objects, key, query["uploadId"])
        if self.command == "DELETE" and "uploadId" in query:
            with state.lock:
                _, _, parts = state.uploads.pop(query["uploadId"], ("", "", {}))
            for part in parts.values():
                os.unlink(part.path)
            return self._answer(204, b"", {})
        if self.command == "DELETE":
            self._remove(bucket, objects, key)
            return self._answer(204, b"", {})
        raise Refused(501, "NotImplemented", "not part of this small server")

    # -- signatures ----------------------------------------------------------------------------------------------

    def _authorize(self, raw_path: str, bucket: str) -> None:
        state, headers = self.server.state, self.headers
        given = headers.get("Authorization", "")
        if given.startswith("AWS4-HMAC-SHA256 "):
            fields = dict(part.strip().split("=", 1) for part in given[17:].split(","))
            credential, signed, sign = fields["Credential"], fields["SignedHeaders"], fields["Signature"]
            when, payload, pairs = headers["x-amz-date"], headers["x-amz-content-sha256"], self.pairs
            token = headers.get("x-amz-security-token")
        elif "X-Amz-Signature" in self.query:
            query = self.query
            credential, signed, sign = query["X-Amz-Credential"], query["X-Amz-SignedHeaders"], query["X-Amz-Signature"]
            when, payload, token = query["X-Amz-Date"], "UNSIGNED-PAYLOAD", query.get("X-Amz-Security-Token")
            pairs = [pair for pair in self.pairs if pair[0] != "X-Amz-Signature"]
        elif bucket.startswith(("public-", "unlisted-")) and self.command in {"GET", "HEAD"}:
            return
        else:
            raise Refused(403, "AccessDenied", "Access Denied")
        key, scope = credential.split("/", 1)
        region = scope.split("/")[1]
        secret = state.secret_of(key, token)
        if region != state.region:
            message = (
                f"The authorization header is malformed; the region '{region}' is wrong; expecting '{state.region}'"
            )
            raise Refused(400, "AuthorizationHeaderMalformed", message, f"<Region>{state.region}</Region>")
        lines = "".join(f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in signed.split(";"))
        uri = quote(unquote(raw_path), safe="/-_.~")
        canonical = f"{self.command}\n{uri}\n{canonical_query(pairs)}\n{lines}\n{signed}\n{payload}"
        if not hmac.compare_digest(signature(secret, scope, when, canonical), sign):
            raise Refused(403, "SignatureDoesNotMatch", "The request signature we calculated does not match.",
                          f"<CanonicalRequest>{escape(canonical)}</CanonicalRequest>")  # fmt: skip

    # -- objects -------------------------------------------------------------------------------------------------

    def _get(self, objects: dict[str, StoredObject], key: str) -> None:
        found = objects.get(key)
        time.sleep(self.server.state.round_trip_s)
        if found is None:
            raise Refused(404, "NoSuchKey", "The specified key does not exist.")
        self.answered = found
        wanted = self.headers.get("If-Match")
        if wanted and wanted not in {"*", found.etag}:
            raise Refused(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
        headers = {
            "ETag": found.etag,
            "Last-Modified": formatdate(found.modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if self.headers.get("If-None-Match") == found.etag:
            return self._answer(304, b"", headers)
        start, stop, status = 0, found.size, 200
        spec = self.headers.get("Range")
        if spec and spec.startswith("bytes="):
            first, _, last = spec[6:].partition("-")
            start = int(first) if first else max(0, found.size - int(last))
            stop = min(found.size, int(last) + 1) if first and last else found.size
            if start >= found.size:
                raise Refused(416, "InvalidRange", "The requested range is not satisfiable")
            status, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{found.size}"
        try:
            return self._send_file(status, found.path, start, stop, headers)
        except FileNotFoundError:  # it was replaced meanwhile, and nothing is answered yet
            return self._get(objects, key)

    def _send_file(self, status: int, path: str, start: int, stop: int, headers: dict[str, str]) -> None:
        self.entry.update(status=status, bytes=stop - start if self.command == "GET" else 0)
        head = self._head(status, {**headers, "Content-Length": str(stop - start)})
        if self.command == "HEAD":
            self.connection.sendall(head)
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if stop - start <= 1 << 17:
                self.connection.sendall(head + os.pread(descriptor, stop - start, start))
                return
            self.connection.sendall(head, socket.MSG_MORE)
            line = self.server.state.line
            while start < stop:
                most = stop - start
                if line.bytes_per_s:
                    most = min(most, 256 << 10)
                    line.pass_on(most)
                start += os.sendfile(self.connection.fileno(), descriptor, start, most)
        finally:
            os.close(descriptor)

    def _store_body(self) -> StoredObject:
        """The request's body as a file of its own."""
        self.body_read = True
        path = os.path.join(self.server.state.root, uuid.uuid4().hex)
        digest, checked, size = hashlib.md5(), hashlib.sha256(), 0
        declared = self.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        with open(path, "wb") as file:
            for piece in self._body():
                digest.update(piece)
                if not declared.startswith(_UNSAFE_BODY):
                    checked.update(piece)
                file.write(piece)
                size += len(piece)
        if not declared.startswith(_UNSAFE_BODY) and checked.hexdigest() != declared:
            os.unlink(path)
            raise Refused(400, "XAmzContentSHA256Mismatch", "The provided hash does not match what was computed.")
        return StoredObject(path=path, size=size, etag=f'"{digest.hexdigest()}"', modified=time.time())

    def _body(self):
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            piece = self.rfile.read(min(left, 1 << 20))
            if not piece:
                self.close_connection = True
                raise ConnectionError("the client left")
            left -= len(piece)
            yield piece

    def _drain(self) -> None:
        if not self.body_read:
            self.body_read = True
            for _ in self._body():
                pass

    def _put(self, bucket: str, objects: dict[str, StoredObject], key: str) -> None:
        stored = self._store_body()
        with self.server.state.lock:
            before = objects.get(key)
            exists = self.headers.get("If-None-Match") == "*" and before is not None
            wanted = self.headers.get("If-Match")
            if exists or (wanted and (before is None or before.etag != wanted)):
                os.unlink(stored.path)
                raise Refused(
                    412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
                )
            objects[key] = stored
            self.server.state.note(bucket, key, stored)
        if before is not None:
            os.unlink(before.path)
        self.answered = stored
        self._answer(200, b"", {"ETag": stored.etag})

    def _remove(self, bucket: str, objects: dict[str, StoredObject], key: str) -> None:
        with self.server.state.lock:
            before = objects.pop(key, None)
            self.server.state.note(bucket, key)
        if before is not None:
            os.unlink(before.path)

    def _put_part(self, upload: str, number: int) -> None:
        stored = self._store_body()
        with self.server.state.lock:
            found = self.server.state.uploads.get(upload)
            if found is not None:
                found[2][number] = stored
        if found is None:
            os.unlink(stored.path)
            raise Refused(404, "NoSuchUpload", "The specified multipart upload does not exist.")
        self._answer(200, b"", {"ETag": stored.etag})

    def _complete(self, bucket: str, objects: dict[str, StoredObject], key: str, upload: str) -> None:
        self.body_read = True
        listed = ET.fromstring(b"".join(self._body()))
        numbers = [int(node.text or 0) for node in listed.iter() if node.tag.endswith("PartNumber")]
        with self.server.state.lock:
            found = self.server.state.uploads.pop(upload, None)
        if found is None or any(number not in found[2] for number in numbers):
            raise Refused(400, "InvalidPart", "One or more of the specified parts could not be found.")
        parts = [found[2][number] for number in numbers]
        if any(part.size < 5 << 20 for part in parts[:-1]):
            raise Refused(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
        path, digest = os.path.join(self.server.state.root, uuid.uuid4().hex), hashlib.md5()
        with open(path, "wb") as file:
            for part in parts:
                digest.update(bytes.fromhex(part.etag.strip('"')))
                with open(part.path, "rb") as source:
                    while piece := source.read(1 << 22):
                        file.write(piece)
        for part in found[2].values():
            os.unlink(part.path)
        etag = f'"{digest.hexdigest()}-{len(parts)}"'
        size = sum(part.size for part in parts)
        with self.server.state.lock:
            objects[key] = stored = StoredObject(path=path, size=size, etag=etag, modified=time.time())
            self.server.state.note(bucket, key, stored)
        self._xml(
            "CompleteMultipartUploadResult", f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><ETag>{etag}</ETag>"
        )

    # -- buckets -------------------------------------------------------------------------------------------------

    def _bucket(self, bucket: str, objects: dict[str, StoredObject]) -> None:
        if self.command == "POST" and "delete" in self.query:
            self.body_read = True
            tree = ET.fromstring(b"".join(self._body()))
            keys = [node.text or "" for node in tree.iter() if node.tag.endswith("Key")]
            if bucket.startswith("locked-"):  # the answer as a whole is a 200, as AWS's is
                denied = "<Code>AccessDenied</Code><Message>Access Denied</Message>"
                rows = "".join(f"<Error><Key>{escape(key)}</Key>{denied}</Error>" for key in keys)
                return self._xml("DeleteResult", rows)
            for key in keys:
                self._remove(bucket, objects, key)
            return self._xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))
        if self.command == "HEAD":
            return self._answer(200, b"", {"x-amz-bucket-region": self.server.state.region})
        if self.command == "GET" and "location" in self.query:
            return self._xml("LocationConstraint", "")
        if self.command == "GET" and "uploads" in self.query:
            with self.server.state.lock:
                found = [
                    (key, upload) for upload, (name, key, _) in self.server.state.uploads.items() if name == bucket
                ]
            return self._xml("ListMultipartUploadsResult", "".join(
                f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId></Upload>" for key, upload in found
            ))  # fmt: skip
        if self.command == "GET":
            return self._list(bucket, objects)
        raise Refused(501, "NotImplemented", "not part of this small server")

    def _list(self, bucket: str, objects: dict[str, StoredObject]) -> None:
        query = self.query
        prefix, delimiter, limit = query.get("prefix", ""), query.get("delimiter", ""), int(query.get("max-keys", 1000))
        after = query.get("continuation-token") or query.get("start-after", "")
        shown = (lambda key: quote(key, safe="/-_.~")) if query.get("encoding-type") == "url" else escape
        with self.server.state.lock:
            items = sorted(objects.items())
        rows, last, more, common = [], "", False, set()
        for key, stored in items:
            if not key.startswith(prefix):
                continue
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            mark = key[: cut + len(delimiter)] if cut >= 0 else key
            if mark <= after or mark in common:
                continue
            if len(rows) == limit:
                more = True
                break
            last = mark
            if cut >= 0:
                common.add(mark)
                rows.append(f"<CommonPrefixes><Prefix>{shown(mark)}</Prefix></CommonPrefixes>")
            else:
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
                rows.append(f"<Contents><Key>{shown(key)}</Key><LastModified>{when}</LastModified><ETag>"
                            f"{escape(stored.etag)}</ETag><Size>{stored.size}</Size></Contents>")  # fmt: skip
        coding = "<EncodingType>url</EncodingType>" if query.get("encoding-type") == "url" else ""
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        inner = (
            f"<Name>{bucket}</Name><Prefix>{shown(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{coding}{token}{''.join(rows)}"
        )
        self._xml("ListBucketResult", inner)

    # -- answers -------------------------------------------------------------------------------------------------

    def _xml(self, name: str, inner: str) -> None:
        self._drain()
        space = "http://s3.amazonaws.com/doc/2006-03-01/"
        body = f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="{space}">{inner}</{name}>'
        self._answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.entry.update(status=status)
        if status not in {204, 304}:
            headers = {**headers, "Content-Length": str(len(body))}
        self.connection.sendall(self._head(status, headers) + (b"" if self.command == "HEAD" else body))

    def _head(self, status: int, headers: dict[str, str]) -> bytes:
        reason = self.responses.get(status, ("",))[0] if status in self.responses else ""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {status} {reason}\r\nServer: mini-s3\r\n{lines}\r\n".encode()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, host: str, port: int, state: State, handler: type[Handler] = Handler) -> None:
        super().__init__((host, port), handler)
        self.state = state

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--root", required=True)
    parser.add_argument("--key", default=KEY)
    parser.add_argument("--secret", default=SECRET)
    parser.add_argument("--region", default=REGION)
    parser.add_argument("--bucket", action="append", default=[])
    parser.add_argument("--mb-per-s", type=float, default=0.0, help="of all answers together; default: no limit")
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="how late each object comes")
    args = parser.parse_args()
    os.makedirs(args.root, exist_ok=True)
    line = Line(args.mb_per_s * 1e6)
    state = State(root=args.root, key=args.key, secret=args.secret, region=args.region, line=line)
    state.round_trip_s = args.round_trip_ms / 1e3
    state.buckets.update({name: {} for name in args.bucket})
    state.remember()
    server = Server(args.host, args.port, state)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.buffer.read()  # ends with the parent, however that ends


if __name__ == "__main__":
    main()
