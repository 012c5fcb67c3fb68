"""Keys that end, are replaced, or are refused, while they are used."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.errors import AccessDeniedError
from streaming.storage import Storage
from streaming.storage.adapters import in_place
from streaming.storage.adapters.object import ObjectAdapter
from streaming.storage.adapters.object_errors import AnswerError, RequestPlace, object_errors
from streaming.storage.adapters.profile_keys import AHEAD, ProfileKeys
from tests.support.programs.soak_run import NUM_SAMPLES, Size, Soak, growth, soak
from tests.support.servers.on_loopback import MiniGcsServer, MiniS3Server, fresh_name

BEGIN = datetime(2026, 11, 29, tzinfo=UTC)
MIB = 1 << 20
OBSTORE_AHEAD = timedelta(minutes=5)
BOTO_AHEAD = timedelta(minutes=10)


# ------------------------------------------------------------------------------------------------- ends of sessions


@dataclass
class Boto:
    """What botocore does: a new session for whoever asks in the last ten minutes of one. ``now`` is the only clock."""

    lasts: timedelta | None
    now: datetime = BEGIN
    works: bool = True
    sessions: int = 0
    _expiry_time: datetime | None = None
    keys: Any = None

    def get_frozen_credentials(self) -> Any:
        due = self.keys is None or (self._expiry_time is not None and self._expiry_time - self.now < BOTO_AHEAD)
        if due:
            if not self.works:
                raise RuntimeError("the program that makes sessions is ill")
            self.sessions += 1
            self.keys = SimpleNamespace(access_key=f"key-{self.sessions}", secret_key="s", token="t")
            # botocore's zones are of dateutil, and obstore takes Python's own UTC alone
            self._expiry_time = self.lasts and (self.now + self.lasts).astimezone(timezone(timedelta(hours=2)))
        return self.keys


@dataclass
class Obstore:
    """What obstore does: it keeps keys until five minutes before the end that it was told."""

    provider: ProfileKeys
    held: dict[str, Any] = field(default_factory=dict)

    def key_at(self, now: datetime) -> dict[str, Any]:
        end = self.held.get("expires_at", now)
        if not self.held or (end is not None and end - now <= OBSTORE_AHEAD):
            self.held = dict(self.provider())
        return self.held


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 14 * 3600), st.floats(0.02, 0.4))
def test_no_request_is_signed_with_a_key_that_has_ended(lasts_s: int, step: float) -> None:
    """Sessions of any length, asked for at any rate; and their program is not started again and again."""
    boto = Boto(timedelta(seconds=lasts_s))
    store = Obstore(ProfileKeys(boto, lambda: boto.now))
    for _ in range(int(6 / step)):
        key = store.key_at(boto.now)
        assert key["expires_at"] > boto.now
        assert key["expires_at"].tzinfo is UTC
        assert key["access_key_id"] == f"key-{boto.sessions}"
        boto.now += timedelta(seconds=lasts_s * step)
    lived = boto.now - BEGIN
    assert boto.sessions <= 2 + 2 * (lived / timedelta(seconds=lasts_s)) * (1 + AHEAD.total_seconds() / lasts_s)
    assert boto.sessions <= 2 + 2.1 * 6


def test_plain_keys_of_a_profile_have_no_end() -> None:
    boto = Boto(None)
    keys = ProfileKeys(boto, lambda: boto.now)
    assert keys()["expires_at"] is None
    boto.now += timedelta(days=100)
    assert keys()["access_key_id"] == "key-1"


def test_a_session_is_used_to_its_end_if_it_cannot_be_renewed() -> None:
    boto = Boto(timedelta(minutes=1))
    keys = ProfileKeys(boto, lambda: boto.now)
    assert keys()["access_key_id"] == "key-1"
    boto.works = False
    boto.now += timedelta(seconds=59)
    assert keys()["access_key_id"] == "key-1"
    boto.now += timedelta(seconds=1)
    with pytest.raises(RuntimeError, match="is ill"):
        keys()
    boto.works = True
    assert keys()["access_key_id"] == "key-2"


# -------------------------------------------------------------------------------------------------- keys that change


class Source:
    """A place where keys are looked up, and a store that knows the last ones alone."""

    url: str
    options: dict[str, Any]

    def replace(self) -> None:
        """Make other keys, write them where they are looked up, and let the store refuse those before."""
        raise NotImplementedError


@dataclass
class S3Source(Source):
    server: MiniS3Server
    monkeypatch: pytest.MonkeyPatch
    folder: Path
    kind: str
    client: str | None = None
    key: str = ""

    def __post_init__(self) -> None:
        self.url = self.server.create_bucket(fresh_name())
        self.options = {"endpoint_url": self.server.url, "region": self.server.region, "client": self.client}
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
            self.monkeypatch.delenv(name, raising=False)
        for name in ("config", "credentials"):
            (self.folder / name).write_text("")
        self.monkeypatch.setenv("AWS_CONFIG_FILE", str(self.folder / "config"))
        self.monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(self.folder / "credentials"))
        if self.kind == "profile":
            self.options["profile"] = "work"
        if self.kind == "program":
            self.options["profile"] = "work"
            program = f"{sys.executable} -S -E -c 'print(open(\"{self.folder / 'session'}\").read())'"
            (self.folder / "config").write_text(f"[profile work]\ncredential_process = {program}\n")
        self.replace()

    def replace(self) -> None:
        made, before = self.server.begin_session(), self.key
        pairs = {"aws_access_key_id": made["AccessKeyId"], "aws_secret_access_key": made["SecretAccessKey"],
                 "aws_session_token": made["SessionToken"]}  # fmt: skip
        if self.kind == "environment":
            for name, value in pairs.items():
                self.monkeypatch.setenv(name.upper(), value)
        elif self.kind == "program":
            (self.folder / "session").write_text(json.dumps(made))
        else:
            lines = "".join(f"{name} = {value}\n" for name, value in pairs.items())
            (self.folder / "credentials").write_text(f"[{self.options.get('profile', 'default')}]\n{lines}")
        self.key = made["AccessKeyId"]
        if before:
            self.server.end_session(before)


@dataclass
class TokenSource(Source):
    """A bearer token in the environment."""

    server: MiniGcsServer
    monkeypatch: pytest.MonkeyPatch
    number: int = 0

    def __post_init__(self) -> None:
        self.url, self.options = self.server.create_bucket(fresh_name()), {"endpoint_url": self.server.url}
        self.replace()

    def replace(self) -> None:
        self.number += 1
        token = f"token-{self.number}"
        self.monkeypatch.setenv("GOOGLE_BEARER_TOKEN", token)
        self.server.request("PUT", f"/_token/{token}")


class Azure(BaseHTTPRequestHandler):
    """One blob, for those whose ``Authorization`` or signature in the query has the right word in it."""

    protocol_version = "HTTP/1.1"
    right = ""
    refusal = (401, "InvalidAuthenticationInfo", "Lifetime validation failed. The token is expired.")

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.right in f"{self.headers.get('Authorization', '')} {self.path}":
            head, body, status = {"ETag": '"1"', "Last-Modified": "Fri, 27 Nov 2026 10:00:00 GMT"}, b"x" * 10, 200
        else:
            status, code, message = self.refusal
            head, body = {}, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**head, "Content-Length": len(body)}.items())
        self.wfile.write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body)


@pytest.mark.parametrize(
    ("name", "refusal", "says"),
    [
        ("AZURE_STORAGE_TOKEN", Azure.refusal, "the key has expired"),
        ("AZURE_STORAGE_SAS_KEY", (403, "AuthenticationFailed", "Signature not valid in the specified time frame"),
         "the key has expired"),
        ("AZURE_STORAGE_SAS_KEY", (403, "AuthenticationFailed", "Server failed to authenticate the request."),
         "access denied"),
        ("AZURE_STORAGE_SAS_KEY", (403, "AuthorizationPermissionMismatch", "This request is not authorized"), None),
    ],
)  # fmt: skip
def test_keys_of_azure(
    name: str, refusal: tuple[int, str, str], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def word(number: int) -> str:
        return f"sv=1&sig=word{number}end" if "SAS" in name else f"word{number}end"

    class Blob(Azure):
        right = "word1end"

    Blob.refusal = refusal
    server = ThreadingHTTPServer(("127.0.0.1", 0), Blob)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv(name, word(1))
    storage = Storage({"endpoint_url": f"http://127.0.0.1:{server.server_address[1]}", "account_name": "a"})
    assert len(storage.read("az://c/x")) == 10
    Blob.right = "word2end"
    with pytest.raises(AccessDeniedError) as caught:
        storage.read("az://c/x")
    assert ("looked up" in str(caught.value)) is (says is not None)
    assert (says or "access denied") in str(caught.value)
    monkeypatch.setenv(name, word(2))
    if says is not None:
        assert len(storage.read("az://c/x")) == 10
    server.shutdown()
    thread.join()
    server.server_close()


S3_KINDS = ("environment", "default profile", "profile", "program")
KINDS = [
    *(f"s3 {kind}" for kind in S3_KINDS), "gs environment",
    *(pytest.param(f"s3 {kind} by {client}", marks=pytest.mark.thorough)
      for client in ("obstore", "fsspec") for kind in S3_KINDS),
]  # fmt: skip


@pytest.fixture
def source(
    request: pytest.FixtureRequest, mini_s3: MiniS3Server, mini_gcs: MiniGcsServer, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Source]:  # fmt: skip
    kind: str = request.param
    monkeypatch.setattr(in_place, "LEAST_BYTES", 1)
    if kind.startswith("gs"):
        yield TokenSource(mini_gcs, monkeypatch)
        mini_gcs.request("PUT", f"/_token/{mini_gcs.token}")
        return
    of, _, client = kind.removeprefix("s3 ").partition(" by ")
    yield S3Source(mini_s3, monkeypatch, tmp_path, of, client or None)


def calls(storage: Storage, url: str) -> dict[str, Callable[[], Any]]:
    out = memoryview(bytearray(MIB))

    def write(num_bytes: int) -> None:
        with storage.open_write(f"{url}/written") as writer:
            writer.write(bytes(num_bytes))

    return {
        "read": lambda: storage.read(f"{url}/x", 0, MIB),
        "read_into": lambda: storage.read_into(f"{url}/x", 0, out),
        "info": lambda: storage.info(f"{url}/x"),
        "list": lambda: [info.url for info in storage.list(url)],
        "put": lambda: storage.put(f"{url}/y", b"y"),
        "write": lambda: write(1000),
        "delete": lambda: storage.delete(f"{url}/y"),
        "whole": lambda: storage.read(f"{url}/x"),
    }


@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_keys_that_are_replaced_are_looked_up_by_every_call(
    source: Source, s3fs_closed: Callable[[Storage], Storage]
) -> None:
    storage = s3fs_closed(Storage(source.options))
    storage.put(f"{source.url}/x", bytes(MIB))
    for call in calls(storage, source.url).values():
        source.replace()
        call()


@pytest.mark.parametrize("source", ["s3 profile", "gs environment"], indirect=True)
def test_keys_are_looked_up_once_for_all_requests_that_were_refused(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage({**source.options, "hedge": False})
    storage.put(f"{source.url}/x", bytes(MIB))
    made: list[str] = []
    connect = ObjectAdapter._connect

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        made.append(str(given))
        return connect(self, *given, **named)

    monkeypatch.setattr(ObjectAdapter, "_connect", counted)
    for round_ in range(1, 4):
        source.replace()
        together = threading.Barrier(8)

        def read(_: int, together: threading.Barrier = together) -> int:
            together.wait()
            return len(storage.read(f"{source.url}/x", 0, MIB))

        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(read, range(8))] == [MIB] * 8
        assert len(made) == round_


@pytest.mark.parametrize("source", [*(f"s3 {kind}" for kind in S3_KINDS), "gs environment"], indirect=True)
def test_keys_that_stay_refused_are_an_error_that_says_what_to_do(source: Source) -> None:
    storage = Storage(source.options)
    storage.put(f"{source.url}/x", bytes(MIB))
    if isinstance(source, S3Source):
        source.server.end_session(source.key)
    else:
        source.server.request("PUT", "/_token/another")
    with pytest.raises(AccessDeniedError, match="looked up there once more") as caught:
        storage.read(f"{source.url}/x", 0, MIB)
    assert "expired" in str(caught.value)
    assert "a job that resumes from its last state_dict loses no sample" in str(caught.value)
    source.replace()  # and the same storage goes on, once there are others
    assert len(storage.read(f"{source.url}/x", 0, MIB)) == MIB


def test_an_expired_session_says_that_it_has_expired(mini_s3: MiniS3Server) -> None:
    url = mini_s3.create_bucket(fresh_name())
    Storage(mini_s3.storage_options).put(f"{url}/x", b"x")
    made = mini_s3.begin_session(requests=1)
    options = {"endpoint_url": mini_s3.url, "key": made["AccessKeyId"], "secret": made["SecretAccessKey"],
               "token": made["SessionToken"]}  # fmt: skip
    storage = Storage(options)
    assert bytes(storage.read(f"{url}/x")) == b"x"
    mini_s3.clear_log()
    with pytest.raises(AccessDeniedError, match=r"the key has expired \(400 ExpiredToken: .*never renewed") as caught:
        storage.read(f"{url}/x")
    assert "once more" not in str(caught.value)  # what is given stays what it is
    assert len(mini_s3.log()) == 1


def test_what_a_key_may_not_do_is_no_reason_to_look_up_another(mini_s3: MiniS3Server, monkeypatch, tmp_path) -> None:
    source = S3Source(mini_s3, monkeypatch, tmp_path, "profile")
    locked = mini_s3.create_bucket(fresh_name("locked-"))
    mini_s3.clear_log()
    with pytest.raises(AccessDeniedError, match="access denied") as caught:
        Storage(source.options).read(f"{locked}/x")
    assert "looked up" not in str(caught.value)
    assert len(mini_s3.log()) == 1


@pytest.mark.parametrize(
    ("url", "source", "answer", "says"),
    [
        ("https://h/x?X-Amz-Signature=1", "the URL alone",
         "<Code>AccessDenied</Code><Message>Request has expired</Message>",
         r"the key has expired \(403 AccessDenied: Request has expired\).*a signed URL is never renewed: sign it"),
        ("https://c/x?sig=1", "the URL alone", ("<Code>AuthenticationFailed</Code><Message>No.</Message><Detail>"
         "Signature not valid in the specified time frame</Detail>"),
         r"the key has expired .*a signed URL is never renewed"),
        ("s3://b/expired.tar", "the AWS profile 'x'", "<Code>SignatureDoesNotMatch</Code><Key>expired.tar</Key>",
         r"access denied .*has expired or was replaced"),
        ("s3://b/expired.tar", "the AWS profile 'x'", "<Code>AccessDenied</Code><Key>expired.tar</Key>",
         r"access denied"),
    ],
)  # fmt: skip
def test_what_has_expired_is_what_the_store_says(url: str, source: str, answer: str, says: str) -> None:
    with (
        pytest.raises(AccessDeniedError, match=says) as caught,
        object_errors(RequestPlace(url=url, endpoint="h", source=source), "reading"),
    ):
        raise AnswerError(403, answer)
    assert "looked up" not in str(caught.value)


def test_a_program_that_makes_no_keys_is_quoted(mini_s3: MiniS3Server, monkeypatch, tmp_path: Path) -> None:
    source = S3Source(mini_s3, monkeypatch, tmp_path, "program")
    (tmp_path / "session").unlink()
    with pytest.raises(
        AccessDeniedError, match=r"(?s)profile 'work': it gives no key: .*custom-process.*mend the program"
    ):
        Storage(source.options).read(f"{source.url}/x")


# --------------------------------------------------------------------------------------------------------------- soak


@pytest.mark.thorough
def test_a_short_soak() -> None:
    """Sessions end after a number of requests, plain keys after each epoch, and 5 % of the answers are broken."""
    found = soak(
        Soak(session={"requests": 60}, is_due=lambda epoch: True, is_over=lambda epoch: epoch == 3, share=0.05)
    )
    assert found.num_samples == 3 * 2 * NUM_SAMPLES
    assert found.rotations == 3
    assert found.refused >= found.rotations - 1
    assert found.sessions >= 2
    assert sum(found.broken.values()) > found.broken["all"]


def test_what_a_soak_calls_growth() -> None:
    sizes = [Size(number, 100 + number * (number > 5), 7, 9) for number in range(9)]
    assert growth(sizes) == {"resident_bytes": 8, "descriptors": 0, "threads": 0}
