"""What Storage does when the way or the store misbehaves: recovers, or says what is wrong, soon."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from streaming.errors import AccessDeniedError, ConfigError, NotFoundError, StorageError, TransferError
from streaming.storage import Storage
from streaming.storage.adapters import in_place
from streaming.storage.adapters.object_errors import RequestPlace, object_errors
from streaming.storage.base.adapter import ThrottledError
from streaming.storage.requests import retry
from tests.support.processes.waiting import PATIENCE_S, ended, started
from tests.support.servers.fault_proxy import Fault, FaultProxy
from tests.support.servers.on_loopback import HttpServer, with_port

MIB = 1 << 20
DATA = np.random.default_rng(11).integers(0, 256, 4 * MIB, np.uint8).tobytes()
QUICK = {"first_backoff_s": 0.01, "max_backoff_s": 0.05, "read_timeout_s": 60.0, "max_retries": 4,
         "hedge": False}  # fmt: skip
IMPATIENT = {"read_timeout_s": 1.0}
"""Where an answer stands still for good."""


@pytest.fixture(autouse=True, params=["in place", "through obstore"])
def least_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranges of known length are read in place, or none."""
    monkeypatch.setattr(in_place, "LEAST_BYTES", 1 if request.param == "in place" else 1 << 60)


@pytest.fixture(scope="module")
def url(mini_s3) -> str:
    """One object of 4 MiB."""
    mini_s3.create_bucket("faults")
    Storage(mini_s3.storage_options).put("s3://faults/x.tar", DATA)
    return "s3://faults/x.tar"


def through(proxy: FaultProxy, mini_s3, counts: Counter[str] | None = None, **options: object) -> Storage:
    given = {**mini_s3.storage_options, "endpoint_url": proxy.url, **QUICK, **options}
    seen: Counter[str] = Counter() if counts is None else counts
    return Storage(given, observer=lambda name, amount: seen.update({name: amount}))


def spans(proxy: FaultProxy) -> list[tuple[int, int]]:
    """The byte ranges that were asked for, half-open."""
    asked = [span for _, _, span in proxy.log if span is not None]
    pairs = (span.removeprefix("bytes=").split("-") for span in asked)
    return [(int(first), int(last) + 1) for first, last in pairs]


def calls(storage: Storage, bucket: str) -> list[Callable[[], object]]:
    """Everything that a store may refuse."""
    url = bucket + "/a b/x: (code: 1).tar"
    return [
        lambda: storage.delete(url),  # on s3 a 200 that lists what was not deleted
        lambda: storage.read(url),
        lambda: storage.info(url),
        lambda: storage.exists(url),
        lambda: list(storage.list(bucket + "/a b")),
        lambda: storage.put(url, b"x"),
        lambda: storage.put(url, bytes(20 * MIB)),  # in parts
    ]


@pytest.mark.parametrize("kind", ["status", "reset_before"])
def test_two_refusals_cost_two_more_requests(mini_s3, url: str, kind) -> None:
    counts: Counter[str] = Counter()
    with FaultProxy(mini_s3.port, Fault(kind=kind), Fault(kind=kind)) as proxy:
        assert bytes(through(proxy, mini_s3, counts).read(url, 10, MIB)) == DATA[10:MIB]
    assert spans(proxy) == [(10, MIB)] * 3
    throttled = {"throttled": 2} if kind == "status" else {}
    assert counts == {"requests": 3, "retries": 2, "bytes": MIB - 10, **throttled}


def test_a_reset_in_place_of_an_answer_is_not_taken_for_a_missing_server(mini_s3, url: str) -> None:
    with FaultProxy(mini_s3.port, Fault(kind="reset_before")) as proxy:
        assert bytes(through(proxy, mini_s3, unreachable_s=0).read(url, 0, 10)) == DATA[:10]
    assert len(proxy.log) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["truncate", "reset", "stall"])
def test_after_a_break_only_the_missing_bytes_are_asked_for(mini_s3, url: str, kind) -> None:
    counts: Counter[str] = Counter()
    out = bytearray(len(DATA) - 5)
    with FaultProxy(mini_s3.port, Fault(kind=kind, at_bytes=2 * MIB), Fault(kind=kind, at_bytes=MIB)) as proxy:
        patience = IMPATIENT if kind == "stall" else {}
        through(proxy, mini_s3, counts, **patience).read_into(url, 5, memoryview(out))
    assert out == DATA[5:]
    asked = spans(proxy)
    assert len(asked) == 3
    assert {stop for _, stop in asked} == {len(DATA)}
    starts = [start for start, _ in asked]
    assert starts == sorted(starts)
    if kind != "reset":  # a reset may take all bytes with it that were under way
        assert starts[1] > 5 + 2 * MIB - (512 << 10)
        assert starts[2] > starts[1] + MIB - (512 << 10)
    assert counts["bytes"] == len(out)  # every byte was taken once


def test_what_is_under_way_can_be_asked_for(mini_s3, url: str) -> None:
    began, looked = threading.Event(), threading.Event()

    def observe(name: str, amount: int) -> None:
        if name == "retries":
            began.set()

    def hold(*_: object) -> None:
        """The second answer does not come before somebody has looked."""
        looked.wait(PATIENCE_S)

    with FaultProxy(mini_s3.port, Fault(kind="truncate", at_bytes=MIB), choose=hold) as proxy:
        given = {**mini_s3.storage_options, "endpoint_url": proxy.url, **QUICK}
        storage = Storage(given, observer=observe)
        assert storage.in_flight() == []
        reading = started(lambda: storage.read(url, 10, 3 * MIB))
        assert began.wait(PATIENCE_S)
        (found,) = storage.in_flight()
        looked.set()
        ended(*reading)
    assert (found.url, found.byte_start, found.byte_end) == (url, 10, 3 * MIB)
    assert found.attempt in {1, 2}
    assert 0 < found.num_bytes_received <= MIB
    assert found.age_s > 0
    assert storage.in_flight() == []


def test_what_is_under_way_shows_no_secret(mini_s3) -> None:
    began, shown = threading.Event(), []
    signed = mini_s3.presign("faults", "x.tar")
    with FaultProxy(mini_s3.port, Fault(kind="reset_before")) as proxy:

        def observe(name: str, amount: int) -> None:
            if name == "retries":
                shown.extend(storage.in_flight())
                began.set()

        storage = Storage({**QUICK, "max_retries": 1}, observer=observe)
        with pytest.raises(AccessDeniedError):  # the signature is of another host
            storage.read(with_port(signed, proxy.port), 0, 10)
    assert began.is_set()
    assert "x.tar" in shown[0].url
    assert "X-Amz" not in shown[0].url


def test_reading_to_the_end_goes_on_after_a_break_too(mini_s3, url: str) -> None:
    with FaultProxy(mini_s3.port, Fault(kind="truncate", at_bytes=MIB)) as proxy:
        assert bytes(through(proxy, mini_s3).read(url)) == DATA
    assert len(proxy.log) == 2
    assert spans(proxy)[0][1] == len(DATA)


def test_an_object_replaced_between_two_attempts_is_never_mixed(mini_s3, s3_bucket: str) -> None:
    url = s3_bucket + "/x"
    direct = Storage(mini_s3.storage_options)
    direct.put(url, DATA)

    def replace(name: str, amount: int) -> None:
        if name == "retries":
            direct.put(url, bytes(len(DATA)))

    with FaultProxy(mini_s3.port, Fault(kind="truncate", at_bytes=MIB)) as proxy:
        given = {**mini_s3.storage_options, "endpoint_url": proxy.url, **QUICK}
        with pytest.raises(TransferError, match="changed while it was read"):
            Storage(given, observer=replace).read(url, 0, len(DATA))


def test_a_slow_first_byte_is_waited_for(mini_s3, url: str) -> None:
    with FaultProxy(mini_s3.port, Fault(kind="slow", seconds=0.2)) as proxy:
        assert bytes(through(proxy, mini_s3).read(url, 0, 100)) == DATA[:100]
    assert len(proxy.log) == 1


def test_a_server_that_ignores_range_is_an_error_at_once(mini_s3, url: str) -> None:
    counts: Counter[str] = Counter()
    with (
        FaultProxy(mini_s3.port, *[Fault(kind="ignore_range")] * 5) as proxy,
        pytest.raises(TransferError, match="byte ranges") as caught,
    ):
        through(proxy, mini_s3, counts).read(url, 100, 200)
    assert "supports Range" in str(caught.value)
    assert counts["bytes"] == 0
    assert len(proxy.log) == 1


def test_another_range_than_asked_for_is_an_error(mini_s3, url: str) -> None:
    with (
        FaultProxy(mini_s3.port, *[Fault(kind="shift_range")] * 9) as proxy,
        pytest.raises(TransferError, match="byte ranges"),
    ):
        through(proxy, mini_s3).read(url, 100, 200)


@pytest.mark.parametrize("kind", ["ignore_range", "shift_range"])
def test_ranges_that_worked_before_are_asked_for_again(mini_s3, url: str, kind) -> None:
    with FaultProxy(mini_s3.port) as proxy:
        storage = through(proxy, mini_s3)
        storage.read(url, 0, 100)
        proxy.add(Fault(kind=kind), Fault(kind=kind))
        assert bytes(storage.read(url, 100, 200)) == DATA[100:200]
        assert spans(proxy) == [(0, 100)] + [(100, 200)] * 3


def test_a_wrong_length_is_noticed(mini_s3, url: str) -> None:
    with FaultProxy(mini_s3.port, Fault(kind="wrong_length", at_bytes=60)) as proxy:
        assert bytes(through(proxy, mini_s3).read(url, 100, 200)) == DATA[100:200]
    assert spans(proxy) == [(100, 200), (160, 200)]
    with (
        FaultProxy(mini_s3.port, *[Fault(kind="wrong_length", at_bytes=0)] * 9) as proxy,
        pytest.raises(TransferError, match="got 0 bytes, expected 100"),
    ):
        through(proxy, mini_s3).read(url, 100, 200)
    assert len(proxy.log) == 5  # max_retries=4


def test_a_flipped_byte_is_not_noticed_here(mini_s3, url: str) -> None:
    """The index's CRC32C is what notices: this pins that the proxy can make one, for tests above this layer."""
    with FaultProxy(mini_s3.port, Fault(kind="flip", at_bytes=3)) as proxy:
        got = bytes(through(proxy, mini_s3).read(url, 0, 10))
    assert [index for index in range(10) if got[index] != DATA[index]] == [3]


def test_a_store_that_stays_busy_is_given_up(mini_s3, url: str) -> None:
    with FaultProxy(mini_s3.port, *[Fault(kind="status", status=429)] * 9) as proxy:
        with pytest.raises(TransferError, match="429") as caught:
            through(proxy, mini_s3).read(url, 0, 10)
        assert len(proxy.log) == 5
    assert "gave up after 5 attempts" in "".join(traceback.format_exception(caught.value))


def test_the_deadline_bounds_a_read_that_makes_progress(mini_s3, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes 40 of 100 seconds: one before the deadline, and the one at whose end it has passed."""
    faults = [Fault(kind="truncate", at_bytes=MIB // 2)] * 20
    with FaultProxy(mini_s3.port, *faults) as proxy:
        clock = SimpleNamespace(monotonic=lambda: 40.0 * len(proxy.log), sleep=lambda delay_s: None)
        monkeypatch.setattr(retry, "time", clock)
        with pytest.raises(TransferError):
            through(proxy, mini_s3, deadline_s=100.0).read(url)
        assert len(proxy.log) == 3


def test_uploads_survive_refusals(mini_s3, s3_bucket: str) -> None:
    with FaultProxy(mini_s3.port, Fault(kind="status", method="PUT"), Fault(kind="status", method="PUT")) as proxy:
        storage = through(proxy, mini_s3)
        storage.put(s3_bucket + "/small", DATA)
        proxy.add(Fault(kind="status", method="PUT"), Fault(kind="status", method="POST"))
        with storage.open_write(s3_bucket + "/large", 5 * MIB) as writer:
            for _ in range(3):
                writer.write(DATA)
    direct = Storage(mini_s3.storage_options)
    assert bytes(direct.read(s3_bucket + "/small")) == DATA
    assert bytes(direct.read(s3_bucket + "/large")) == DATA * 3


def test_an_upload_that_fails_says_so_and_leaves_nothing(mini_s3, s3_bucket: str) -> None:
    storage = Storage({**mini_s3.storage_options, "secret": "wrong"})

    def upload() -> None:
        with storage.open_write(s3_bucket + "/x", 5 * MIB) as writer:
            for _ in range(20):
                writer.write(DATA)

    with pytest.raises(AccessDeniedError):
        upload()
    assert list(Storage(mini_s3.storage_options).list(s3_bucket)) == []


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls wait for three seconds in all, at most, before they try again."""
    slept: list[float] = []

    def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        time.sleep(delay_s)

    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    yield
    assert sum(slept) < 3


@pytest.mark.usefixtures("soon")
class TestRefusals:
    """Each names what is wrong and the cure, and soon."""

    @pytest.mark.thorough
    @pytest.mark.parametrize("client", ["obstore", "fsspec"])
    @pytest.mark.parametrize("server", ["moto", "mini_s3"])
    def test_no_such_bucket_or_key(self, request, server: str, client: str, s3fs_closed) -> None:
        options = request.getfixturevalue(server).storage_options
        storage = s3fs_closed(Storage({**options, "client": client}))
        for call in (storage.read, storage.info, lambda url: list(storage.list(url))):
            with pytest.raises(NotFoundError, match=r"no bucket 'nowhere'|no such bucket"):
                call("s3://nowhere/x.tar")
        assert storage.exists("s3://nowhere/x.tar") is False
        with pytest.raises(NotFoundError):
            storage.put("s3://nowhere/x.tar", b"x")

    @pytest.mark.parametrize("client", ["obstore", "fsspec"])
    def test_a_wrong_secret(self, mini_s3, url: str, client: str, s3fs_closed) -> None:
        options = {**mini_s3.storage_options, "secret": "oh-so-wrong", "client": client}
        storage = s3fs_closed(Storage(options))
        for call in (
            storage.read,
            storage.info,
            lambda u: list(storage.list("s3://faults")),
            lambda u: storage.put(u, b"x"),
        ):
            with pytest.raises(AccessDeniedError, match=r"storage.options") as caught:
                call(url)
            text = "".join(traceback.format_exception(caught.value))
            assert "oh-so-wrong" not in text
            assert isinstance(caught.value, PermissionError)

    def test_what_may_not_be_done_is_refused_at_once(self, mini_s3) -> None:
        mini_s3.create_bucket("locked-box")
        for call in calls(Storage(mini_s3.storage_options), "s3://locked-box"):
            mini_s3.clear_log()
            with pytest.raises(AccessDeniedError, match=r"locked-box.*AccessDenied: Access Denied"):
                call()
            assert 1 <= len(mini_s3.log()) <= 2  # no retries; a refused HEAD is asked again by GET, for the reason

    def test_an_unknown_key_and_no_key(self, mini_s3, url: str) -> None:
        with pytest.raises(AccessDeniedError, match="InvalidAccessKeyId"):
            Storage({**mini_s3.storage_options, "key": "who"}).read(url)
        with pytest.raises(AccessDeniedError, match=r"no credentials \(anon=True\)"):
            Storage({"endpoint_url": mini_s3.url, "anon": True}).read(url)

    def test_anonymous_reads_of_public_buckets(self, mini_s3) -> None:
        mini_s3.create_bucket("public-data")
        Storage(mini_s3.storage_options).put("s3://public-data/x", b"free")
        assert bytes(Storage({"endpoint_url": mini_s3.url, "anon": True}).read("s3://public-data/x")) == b"free"

    def test_a_wrong_region(self, mini_s3, url: str) -> None:
        storage = Storage({**mini_s3.storage_options, "region": "eu-north-1"})
        for call in (storage.read, storage.info, lambda u: list(storage.list("s3://faults"))):
            with pytest.raises(
                StorageError, match=r"eu-north-1 \(from the storage option region\).*region='us-east-1'"
            ):
                call(url)
        cured = Storage({**mini_s3.storage_options, "region": "us-east-1"})
        assert len(cured.read(url)) == cured.info(url).size_bytes > 0

    @pytest.mark.thorough
    def test_a_refused_endpoint(self, s3fs_closed) -> None:
        with socket.socket() as held:  # bound, so that nobody else takes the port, but not listening
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
            options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s", "unreachable_s": 0.3}
            for client in ("obstore", "fsspec"):
                storage = s3fs_closed(Storage({**options, "client": client}))
                with pytest.raises(TransferError, match=f"cannot reach http://127.0.0.1:{port}"):
                    storage.read("s3://b/x")
            with pytest.raises(TransferError, match="connection refused"):
                Storage(options).read(f"http://127.0.0.1:{port}/x.tar")

    def test_a_name_that_does_not_resolve(self) -> None:
        options = {"endpoint_url": "http://store.invalid", "key": "k", "secret": "s", "unreachable_s": 0.1}
        with pytest.raises(TransferError, match=r"cannot reach http://store.invalid .*does not resolve"):
            Storage(options).read("s3://b/x")

    def test_a_signed_query_is_never_shown(self, mini_s3, url: str) -> None:
        signed = mini_s3.presign("faults", "x.tar")
        tampered = signed[:-4] + "0000"
        with pytest.raises(AccessDeniedError) as caught:
            Storage().read(tampered, 0, 10)
        text = "".join(traceback.format_exception(caught.value))
        assert "x.tar" in text
        assert tampered[-40:] not in text
        missing = mini_s3.presign("faults", "missing.tar")
        with pytest.raises(NotFoundError) as gone:
            Storage().read(missing)
        assert "X-Amz" not in "".join(traceback.format_exception(gone.value))

    def test_keys_that_stores_treat_differently_are_refused(self, mini_s3) -> None:
        storage = Storage(mini_s3.storage_options)
        for bad in ("s3://b/a//b", "s3://b/../c", "s3:///x"):
            with pytest.raises(ConfigError):
                storage.read(bad)

    def test_an_unknown_scheme(self) -> None:
        with pytest.raises(ConfigError, match="nosuch"):
            Storage().read("nosuch://b/x")


class TestMessages:
    """What cannot be met on loopback: obstore's own texts, as it words them."""

    PLACE = RequestPlace(
        url="s3://b/x.tar?no-query-here", endpoint="s3.us-east-1.amazonaws.com", source="the instance's role"
    )

    def raised(self, error: Exception, place: RequestPlace = PLACE) -> Exception:
        def work() -> None:
            with object_errors(place, "reading"):
                raise error

        with pytest.raises(StorageError) as caught:
            work()
        return caught.value

    def test_no_credentials_anywhere(self) -> None:
        text = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 5s - HTTP error"
        error = self.raised(GenericError(text))
        assert isinstance(error, AccessDeniedError)
        assert "no credentials found; tried the instance's role" in str(error)
        assert "anon=True" in str(error)

    def test_a_redirect_to_another_region(self) -> None:
        place = RequestPlace(url="s3://b/x", endpoint="e", source="s", region="us-east-1 (from the default)")
        text = "Received redirect without LOCATION, this normally indicates an incorrectly configured region"
        assert "not in region us-east-1 (from the default)" in str(self.raised(GenericError(text), place))

    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            ("AccessDenied", AccessDeniedError),
            ("403", AccessDeniedError),  # Azure's
            ("NoSuchKey", NotFoundError),
            ("SlowDown", ThrottledError),
            ("503", ThrottledError),
            ("MalformedXML", StorageError),
        ],
    )
    def test_a_key_that_a_delete_left(self, code: str, kind: type[Exception]) -> None:
        what = f"DeleteObjects request failed for key a: b: why\nit did (code: {code})"
        text = f"Generic S3 error: {what}\n\nDebug source:\nGeneric {{}}"
        error = self.raised(GenericError(text))
        assert type(error) is kind
        if kind is StorageError:
            assert f"({code}: why\nit did)" in str(error)

    def test_a_session_token_in_the_stores_answer_is_not_repeated(self) -> None:
        body = "<Code>SignatureDoesNotMatch</Code><CanonicalRequest>x-amz-security-token:t0k3n</CanonicalRequest>"
        error = self.raised(PermissionDeniedError(f"non-2xx status code: 403 Forbidden: {body}"))
        assert "t0k3n" not in "".join(traceback.format_exception(error))


def test_google_buckets_are_read_from_an_endpoint_of_ones_own(tmp_path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "x.tar").write_bytes(DATA)
    with HttpServer(tmp_path) as web:
        storage = Storage({"endpoint_url": web.url, "anon": True})
        assert bytes(storage.read("gs://bucket/x.tar", 5, 500)) == DATA[5:500]
        assert storage.info("gs://bucket/x.tar").size_bytes == len(DATA)
        with pytest.raises(NotFoundError, match=r"gs://bucket/y\.tar"):
            storage.read("gs://bucket/y.tar")


def test_google_refuses_at_once_and_says_why(mini_gcs) -> None:
    mini_gcs.create_bucket("locked-box")
    mini_gcs.create_bucket("public-box")
    good = Storage(mini_gcs.storage_options)
    good.put("gs://public-box/x", b"free")
    wrong = Storage({**mini_gcs.storage_options, "token": "oh-so-wrong"})
    for storage, bucket in ((good, "gs://locked-box"), (wrong, "gs://public-box")):
        for call in calls(storage, bucket):
            mini_gcs.clear_log()
            with pytest.raises(AccessDeniedError, match=r"box.*the storage option token") as caught:
                call()
            assert "oh-so-wrong" not in "".join(traceback.format_exception(caught.value))
            assert 1 <= len(mini_gcs.log()) <= 2
    anonymous = Storage({"endpoint_url": mini_gcs.url, "anon": True})
    assert bytes(anonymous.read("gs://public-box/x")) == b"free"
    with pytest.raises(NotFoundError, match="no bucket 'nowhere'"):
        good.read("gs://nowhere/x.tar")


def test_an_aborted_upload_to_google_is_given_up(mini_gcs, gcs_bucket: str) -> None:
    writer = Storage(mini_gcs.storage_options).open_write(gcs_bucket + "/x", 5 * MIB)
    writer.write(bytes(15 * MIB))
    writer.abort()
    queries = [(entry["method"], entry["query"]) for entry in mini_gcs.log()]
    assert ("POST", ["uploads"]) in queries
    assert ("DELETE", ["uploadId"]) in queries


@pytest.mark.thorough
@pytest.mark.usefixtures("soon")
def test_azure_refuses_at_once_and_says_why(azurite, azure_container: str) -> None:
    storage = Storage({**azurite.storage_options, "account_key": "b2gtc28td3Jvbmc="})
    for call in calls(storage, azure_container):
        with pytest.raises(AccessDeniedError, match=r"the storage option account_key") as caught:
            call()
        assert "b2gtc28td3Jvbmc=" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(NotFoundError, match="no bucket 'nowhere'"):
        Storage(azurite.storage_options).read("az://nowhere/x.tar")


def test_azure_names_its_account_and_endpoint() -> None:
    options = {"account_name": "acct", "account_key": "a2V5", "unreachable_s": 0.1}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for url in ("az://box/x.tar", "abfs://box@acct.dfs.core.windows.net/x.tar"):
        with pytest.raises(TransferError, match=f"cannot reach http://127.0.0.1:{port}/acct"):
            Storage({**options, "endpoint_url": f"http://127.0.0.1:{port}/acct"}).read(url)
