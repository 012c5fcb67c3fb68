"""Servers on loopback for tests, the demo and benchmarks: processes on free ports, stopped with the context.

Each is a context manager with ``url`` and, where it is a store, ``storage_options`` and ``create_bucket``. They are
terminated on exit, and the small ones end by themselves when their standard input does.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.parse
import uuid
from email.utils import formatdate
from typing import Any, Self

from tests.support.processes.waiting import PATIENCE_S, until

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))  # our servers import each other as tests do


def free_port() -> int:
    """A port of 127.0.0.1 that nobody is listening on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LoopbackServer:
    """A server process with its own scratch folder."""

    host = "127.0.0.1"
    port: int

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _start(self) -> None:
        raise NotImplementedError

    def _spawn(self, *command: str, announces: bool = False) -> None:
        """Start ``command`` and wait until it listens: it prints its port, or the port answers."""
        with open(os.path.join(self._folder, "stderr"), "w") as complaints:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if announces else subprocess.DEVNULL,
                stderr=None if announces else complaints,
                text=True,
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": _ROOT},
            )
        if announces:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"{command[0]} ended with {self._process.wait()}")
            self.port = int(line)
            return
        until(lambda: self._listens(command[0]), f"{command[0]} listens")

    def _listens(self, name: str) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            with open(os.path.join(self._folder, "stderr")) as file:
                raise RuntimeError(f"{name} ended with {self._process.returncode}: {file.read()[-2000:]}")
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="shardstream-server-")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the process and remove its folder; a repeated call does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(self, *error: object) -> None:
        self.stop()

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """One plain HTTP request to this server."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class MotoServer(LoopbackServer):
    """moto's S3: wide API, but no signature checks, slow, one request per connection."""

    key, secret, region = "moto-key", "moto-secret", "us-east-1"

    def __init__(self, buckets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._buckets = buckets

    @property
    def storage_options(self) -> dict[str, str]:
        return {"endpoint_url": self.url, "key": self.key, "secret": self.secret, "region": self.region}

    def _start(self) -> None:
        self.port = free_port()
        program = "import sys; from moto.server import main; main(sys.argv[1:])"
        self._spawn(sys.executable, "-c", program, "-H", "127.0.0.1", "-p", str(self.port))
        for name in self._buckets:
            self.create_bucket(name)

    def create_bucket(self, name: str) -> str:
        """Create the bucket; return its URL."""
        scope = f"{self.key}/20260101/{self.region}/s3/aws4_request"
        status, body = self.request("PUT", f"/{name}", Authorization=f"AWS4-HMAC-SHA256 Credential={scope}, "
                                    "SignedHeaders=host, Signature=0")  # fmt: skip
        if status != 200:
            raise RuntimeError(f"moto answered {status} to create {name}: {body[:500]!r}")
        return f"s3://{name}"


class MiniS3Server(LoopbackServer):
    """Our own small S3: checks signatures and regions, keeps connections, logs requests; see mini_s3.py."""

    key, secret = "mini-key", "mini-secret"

    def __init__(
        self, buckets: tuple[str, ...] = (), region: str = "us-east-1", port: int = 0, host: str = "127.0.0.1",
        mb_per_s: float = 0.0, round_trip_ms: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.host = host
        self._line = ("--mb-per-s", str(mb_per_s), "--round-trip-ms", str(round_trip_ms))
        self._buckets = buckets
        self._port = port
        self.region = region

    @property
    def storage_options(self) -> dict[str, str]:
        return {"endpoint_url": self.url, "key": self.key, "secret": self.secret, "region": self.region}

    def _start(self) -> None:
        program, objects = os.path.join(_HERE, "mini_s3.py"), os.path.join(self._folder, "objects")
        buckets = [item for name in self._buckets for item in ("--bucket", name)]
        self._spawn(sys.executable, program, "--root", objects, "--host", self.host, "--port", str(self._port),
                    "--region", self.region, *self._line, *buckets, announces=True)  # fmt: skip

    def kill(self) -> None:
        """End the process by SIGKILL, with answers half sent; its objects stay for :meth:`start_again`."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()

    def start_again(self) -> None:
        """Another process on the same port, with the same objects."""
        self._port = self.port
        self._start()

    def _client(self) -> Any:
        import boto3  # noqa: PLC0415 (slow, and not for every user of this file)
        from botocore.config import Config  # noqa: PLC0415

        return boto3.client("s3", endpoint_url=self.url, aws_access_key_id=self.key, aws_secret_access_key=self.secret,
                            region_name=self.region, config=Config(signature_version="s3v4"))  # fmt: skip

    def create_bucket(self, name: str) -> str:
        """Create the bucket; its URL. (Unsigned: a client that signs is slow to make, and many tests need a bucket.)"""
        status, _ = self.request("PUT", f"/_buckets/{name}")
        if status != 200:
            raise RuntimeError(f"mini_s3 answered {status} to create {name}")
        return f"s3://{name}"

    def put_object(self, bucket: str, key: str, body: bytes) -> None:
        """Store an object under any key, such as consoles make for an empty folder."""
        with contextlib.closing(self._client()) as client:
            client.put_object(Bucket=bucket, Key=key, Body=body)

    def presign(self, bucket: str, key: str, expires_s: int = 3600) -> str:
        """A presigned GET URL."""
        with contextlib.closing(self._client()) as client:
            params = {"Bucket": bucket, "Key": key}
            return str(client.generate_presigned_url("get_object", Params=params, ExpiresIn=expires_s))

    def begin_session(self, **life: float) -> dict[str, str]:
        """Keys that are good for ``seconds=``, ``requests=`` or (nothing given) always; see mini_s3.py."""
        found: dict[str, str] = json.loads(self.request("POST", f"/_sessions?{urllib.parse.urlencode(life)}")[1])
        return found

    def end_session(self, key: str) -> None:
        """Let a key be unknown from now on."""
        self.request("DELETE", f"/_sessions?key={key}")

    def log(self) -> list[dict[str, object]]:
        """Every request since the last :meth:`clear_log`: method, path, query names, range, status, bytes."""
        found: list[dict[str, object]] = json.loads(self.request("GET", "/_log")[1])
        return found

    def clear_log(self) -> None:
        self.request("DELETE", "/_log")


class FaultyLine(LoopbackServer):
    """A fault proxy in a process of its own, in front of the server on a port of this machine; see fault_proxy.py.

    Args:
        port: Of the server.
        share: Of the answers that are broken, drawn by ``seed``.
        kinds: How.
        seed: Of what is drawn.
    """

    def __init__(self, port: int, share: float, kinds: tuple[str, ...], seed: int = 0) -> None:
        super().__init__()
        self._arguments = (str(port), "--share", str(share), "--seed", str(seed), "--kinds", *kinds)

    def _start(self) -> None:
        program = os.path.join(_HERE, "fault_proxy.py")
        self._spawn(sys.executable, program, *self._arguments, announces=True)

    def broken(self) -> dict[str, int]:
        """How many answers were broken, by the kind of fault, and how many there were (``"all"``)."""
        found: dict[str, int] = json.loads(self.request("GET", "/_broken")[1])
        return found


class MiniGcsServer(LoopbackServer):
    """Our own small Google Cloud Storage: checks its bearer token, logs requests; see mini_gcs.py."""

    token = "mini-token"

    @property
    def storage_options(self) -> dict[str, str]:
        return {"endpoint_url": self.url, "token": self.token}

    def _start(self) -> None:
        program, objects = os.path.join(_HERE, "mini_gcs.py"), os.path.join(self._folder, "objects")
        self._spawn(sys.executable, program, "--root", objects, announces=True)

    def create_bucket(self, name: str) -> str:
        """Create the bucket; return its URL."""
        status, _ = self.request("PUT", f"/_buckets/{name}")
        if status != 200:
            raise RuntimeError(f"mini_gcs answered {status} to create {name}")
        return f"gs://{name}"

    def log(self) -> list[dict[str, object]]:
        """Every request since the last :meth:`clear_log`, as :meth:`MiniS3Server.log`."""
        found: list[dict[str, object]] = json.loads(self.request("GET", "/_log")[1])
        return found

    def clear_log(self) -> None:
        self.request("DELETE", "/_log")


class HttpServer(LoopbackServer):
    """A plain web server over ``root`` that answers ranges: nginx where installed, else our own small one."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__()
        self._root = os.path.abspath(os.fspath(root))

    def _start(self) -> None:
        nginx = shutil.which("nginx")
        if nginx is None:
            program = os.path.join(_HERE, "mini_http.py")
            self._spawn(sys.executable, program, "--root", self._root, announces=True)
            return
        self.port = free_port()
        config = os.path.join(self._folder, "nginx.conf")
        with open(config, "w") as file:
            file.write(
                ("user root; " if os.getuid() == 0 else "")  # its own user may not enter root's folders
                + "daemon off; worker_processes 2; pid nginx.pid; error_log stderr;\n"
                "events { worker_connections 1024; }\n"
                "http { access_log off; sendfile on; tcp_nopush off; keepalive_requests 1000000;\n"
                " client_body_temp_path t; proxy_temp_path t; fastcgi_temp_path t;\n"
                " uwsgi_temp_path t; scgi_temp_path t;\n"
                f" server {{ listen 127.0.0.1:{self.port}; root {json.dumps(self._root)}; }} }}\n"
            )
        self._spawn(nginx, "-p", self._folder, "-c", config)


class GuardedHttpServer(LoopbackServer):
    """Our own small web server over ``root``, for those alone who bring ``user``, ``password`` and ``query``."""

    def __init__(self, root: str | os.PathLike[str], user: str, password: str, query: str) -> None:
        super().__init__()
        self._root, self._guard = os.path.abspath(os.fspath(root)), f"{user}:{password}?{query}"

    def _start(self) -> None:
        program = os.path.join(_HERE, "mini_http.py")
        self._spawn(sys.executable, program, "--root", self._root, "--guard", self._guard, announces=True)


class AzuriteServer(LoopbackServer):
    """Microsoft's emulator of blob storage; only where ``azurite-blob`` is installed."""

    account = "devstoreaccount1"
    account_key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # public

    @staticmethod
    def installed() -> bool:
        return shutil.which("azurite-blob") is not None

    @property
    def storage_options(self) -> dict[str, str]:
        endpoint = f"{self.url}/{self.account}"
        return {"account_name": self.account, "account_key": self.account_key, "endpoint_url": endpoint}

    def _start(self) -> None:
        self.port = free_port()
        program = shutil.which("azurite-blob")
        if program is None:
            raise RuntimeError("azurite-blob is not installed; npm install -g azurite")
        self._spawn(program, "--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobHost",
                    "127.0.0.1", "--blobPort", str(self.port))  # fmt: skip

    def create_container(self, name: str) -> str:
        """Create the container; its URL. (Signed by hand: obstore makes no containers.)"""
        path, when, version = f"/{self.account}/{name}", formatdate(usegmt=True), "2021-12-02"
        canonical = (
            f"PUT{chr(10) * 12}x-ms-date:{when}\nx-ms-version:{version}\n/{self.account}{path}\nrestype:container"
        )
        digest = hmac.digest(base64.b64decode(self.account_key), canonical.encode(), "sha256")
        signed = {"Authorization": f"SharedKey {self.account}:{base64.b64encode(digest).decode()}",
                  "x-ms-date": when, "x-ms-version": version}  # fmt: skip
        status, body = self.request("PUT", f"{path}?restype=container", b"", **signed)
        if status != 201:
            raise RuntimeError(f"azurite answered {status} to create {name}: {body[:500]!r}")
        return f"az://{name}"


def fresh_name(prefix: str = "bucket") -> str:
    """A bucket name that was never used before."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def with_port(url: str, port: int) -> str:
    """``url`` at another port, as for a proxy in front of it."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=f"{parts.hostname}:{port}"))
