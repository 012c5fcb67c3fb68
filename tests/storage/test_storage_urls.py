"""URLs, patterns, options, credentials and the retry schedule: no server needed."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.errors import AccessDeniedError, ConfigError, NotFoundError
from streaming.shards.catalog.urls import expand_urls
from streaming.storage import RetryPolicy, Storage, join_url, redact, split_url
from streaming.storage.adapters.credentials import azure_config, gcs_config, s3_access
from streaming.storage.adapters.fsspec_adapter import _translate
from streaming.storage.base.adapter import TransientError, UnreachableError
from streaming.storage.base.options import StorageOptions, parse_options
from streaming.storage.requests.retry import retrying
from streaming.storage.store import _MOST_PINS, Pins
from tests.support.code.folders import ROOT

SEGMENT = st.text(st.characters(codec="utf-8", exclude_characters="/?#:\0{}"), min_size=1, max_size=8).filter(
    lambda text: text not in {".", ".."}
)
ROOTS = st.sampled_from(["s3://bucket/", "gs://bucket/", "https://host:81/", "file:///", "/", "", "memory://m/"])


class TestUrls:
    @given(ROOTS, st.lists(SEGMENT, min_size=1, max_size=4), st.sampled_from(["", "?sig=a/b%2F&x=1"]))
    def test_joining_what_was_split_gives_it_back(self, root: str, parts: list[str], query: str) -> None:
        url = root + "/".join(parts) + (query if root.startswith("http") else "")
        directory, name = split_url(url)
        assert name == parts[-1]
        assert join_url(directory, name) == url

    @pytest.mark.parametrize(
        ("url", "directory", "name"),
        [
            ("s3://b/d/x.tar", "s3://b/d", "x.tar"),
            ("s3://b/x.tar", "s3://b", "x.tar"),
            ("s3://b", "s3://b", ""),
            ("/x.tar", "/", "x.tar"),
            ("d/x.tar", "d", "x.tar"),
            ("x.tar", "", "x.tar"),
            ("https://h/d/x.tar?X-Amz-Signature=a/b", "https://h/d?X-Amz-Signature=a/b", "x.tar"),
        ],
    )
    def test_split(self, url: str, directory: str, name: str) -> None:
        assert split_url(url) == (directory, name)

    def test_join(self) -> None:
        assert join_url("s3://b/d/", "x", "y") == "s3://b/d/x/y"
        assert join_url("https://h/d?sig=1", "x") == "https://h/d/x?sig=1"

    def test_redact(self) -> None:
        shown = redact("https://me:pass@host/d/x.tar?X-Amz-Signature=secret")
        assert "pass" not in shown
        assert "secret" not in shown
        assert "host/d/x.tar" in shown
        assert redact("s3://b/k?odd") == "s3://b/k?odd"


class TestExpand:
    def test_braces_do_not_ask_the_store(self) -> None:
        storage = Storage({"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s"})
        urls = expand_urls("s3://b/{train,val}-{000..099}.tar", storage)
        assert len(urls) == 200
        assert urls[0] == "s3://b/train-000.tar"
        assert urls[199] == "s3://b/val-099.tar"

    @given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 5))
    def test_ranges_are_those_of_the_shell(self, first: int, count: int, width: int) -> None:
        pattern = f"d/{{{first:0{width}d}..{first + count:0{width}d}}}.tar"
        wide = max(len(f"{first:0{width}d}"), len(f"{first + count:0{width}d}"))
        padded = f"{first:0{width}d}".startswith("0") and width > 1 and first < 10 ** (width - 1)
        wanted = [f"d/{n:0{wide}d}.tar" if padded else f"d/{n}.tar" for n in range(first, first + count + 1)]
        assert expand_urls(pattern, Storage()) == wanted

    def test_joined_lists_and_paths(self, tmp_path: Path) -> None:
        for name in ("b.tar", "a.tar", "sub/c.tgz", "note.txt"):
            Storage().put(f"{tmp_path}/{name}", b"x")
        below = [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar", f"{tmp_path}/sub/c.tgz"]
        assert expand_urls(tmp_path, Storage()) == below
        assert expand_urls(["z.tar", tmp_path], Storage()) == ["z.tar", *below]
        assert expand_urls("z.tar::{x,y}.tar", Storage()) == ["z.tar", "x.tar", "y.tar"]
        assert expand_urls("https://h/{0..1}.tar?q={a}", Storage()) == [
            "https://h/0.tar?q={a}",
            "https://h/1.tar?q={a}",
        ]

    def test_a_range_of_characters_that_is_reversed(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"bad character range z-a.*as in '\[0-9\]'"):
            expand_urls(f"{tmp_path}/[z-a].tar", Storage())
        assert expand_urls("https://h/a[1].tar", Storage()) == ["https://h/a[1].tar"]

    @pytest.mark.parametrize("spec", ["a.tar::a.tar", ["a.tar", "{a,b}.tar"]])
    def test_twice_the_same_shard_is_an_error(self, spec) -> None:
        with pytest.raises(ConfigError, match="named twice"):
            expand_urls(spec, Storage())

    @pytest.mark.parametrize("spec", ["s3://b/{000..099.tar", "a.tar::", "", [], "s3://b/a*/", "http://b/*.tar", [3]])
    def test_malformed_pattern_is_refused(self, spec) -> None:
        with pytest.raises(ConfigError):
            expand_urls(spec, Storage())

    def test_folder_without_shards_is_refused(self, tmp_path: Path) -> None:
        for spec in (tmp_path, tmp_path / "missing", f"{tmp_path}/"):
            with pytest.raises(NotFoundError, match="no shards below"):
                expand_urls(spec, Storage())

    def test_a_shard_of_another_name(self, tmp_path: Path) -> None:
        (tmp_path / "shard-0001").write_bytes(b"x")
        assert expand_urls(tmp_path / "shard-0001", Storage()) == [f"{tmp_path}/shard-0001"]


class TestOptions:
    def test_unknown_names_list_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'endpoint_url'") as caught:
            Storage({"endpoint_ur": "http://x"})
        assert "region" in str(caught.value)

    def test_values_are_checked_and_never_shown(self) -> None:
        with pytest.raises(ConfigError, match="secret: expected str, got int") as caught:
            Storage({"key": "k", "secret": 12345678})
        assert "12345678" not in str(caught.value)
        for wrong in ({"key": "k"}, {"anon": True, "key": "k", "secret": "s"}, {"client": "curl"},
                      {"read_timeout_s": 0}, {"max_retries": "3"}, {"region": "a", "region_name": "b"}):  # fmt: skip
            with pytest.raises(ConfigError):
                Storage(wrong)

    def test_fsspecs_names_and_none_are_taken(self) -> None:
        options = parse_options({"aws_access_key_id": "k", "aws_secret_access_key": "s", "token": None, "anon": None})
        assert (options.key, options.secret, options.token, options.anon) == ("k", "s", None, False)


KEYS = {"AWS_ACCESS_KEY_ID": "env-key", "AWS_SECRET_ACCESS_KEY": "env-secret", "AWS_SESSION_TOKEN": "env-token",
        "AWS_CONFIG_FILE": "/none", "AWS_SHARED_CREDENTIALS_FILE": "/none"}  # fmt: skip
BARE = {"AWS_CONFIG_FILE": "/none", "AWS_SHARED_CREDENTIALS_FILE": "/none"}


def test_versions_of_the_objects_used_last_are_remembered() -> None:
    pins = Pins()
    for number in range(_MOST_PINS):
        pins.keep(str(number), "v")
    pins.keep("0", "w")
    pins.keep("new", "v")
    assert [pins.get(name) for name in ("0", "1", "2", "new")] == ["v", None, "v", "v"]


class TestCredentials:
    def test_given_keys_win_and_do_not_mix_with_the_environments_token(self) -> None:
        access = s3_access(StorageOptions(key="k", secret="s"), KEYS)
        assert access.provider is not None
        found = access.provider()
        assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("k", "s", None)
        assert "env-secret" not in repr(access)
        assert "'s'" not in repr(access)

    def test_what_is_given_comes_first(self) -> None:
        environ = {**KEYS, "AWS_REGION": "env", "AWS_DEFAULT_REGION": "default"}
        given = s3_access(StorageOptions(key="k", secret="s", token="t", region="given"), environ)
        assert given.provider is not None
        assert (given.provider()["token"], given.region) == ("t", "given")
        assert s3_access(StorageOptions(), environ).region == "env"

    def test_who_asks_in_other_names_shares_no_client(self) -> None:
        given = [
            {"key": "k", "secret": "s"},
            {"key": "k", "secret": "other"},
            {"key": "k", "secret": "s", "token": "t"},
        ]
        names = [s3_access(StorageOptions(**one), KEYS).identity for one in given]  # type: ignore[arg-type]
        names += [s3_access(StorageOptions(), {**KEYS, "AWS_SECRET_ACCESS_KEY": name}).identity for name in "ab"]
        assert len({*names}) == len(names)
        assert s3_access(StorageOptions(**given[0]), KEYS).identity == names[0]  # type: ignore[arg-type]
        assert "other" not in "".join(map(str, names))

    def test_environment_gives_keys_region_and_endpoint(self) -> None:
        access = s3_access(StorageOptions(), {**KEYS, "AWS_DEFAULT_REGION": "r", "AWS_ENDPOINT_URL": "http://e/"})
        assert access.provider is not None
        assert access.provider()["token"] == "env-token"
        assert (access.region, access.region_source, access.endpoint_url) == ("r", "AWS_DEFAULT_REGION", "http://e")
        specific = {"AWS_ENDPOINT_URL": "http://e", "AWS_ENDPOINT_URL_S3": "http://f"}
        assert s3_access(StorageOptions(), {**KEYS, **specific}).endpoint_url == "http://f"
        assert s3_access(StorageOptions(endpoint_url="http://o"), {**KEYS, **specific}).endpoint_url == "http://o"

    def test_anonymous_and_roles(self) -> None:
        assert s3_access(StorageOptions(anon=True), KEYS).anonymous
        for environ, words in (
            ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}, "web identity"),
            ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://x"}, "container"),
            ({}, "instance's role"),
        ):
            access = s3_access(StorageOptions(), {**BARE, **environ})
            assert access.provider is None
            assert words in access.source

    def test_profiles(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "credentials").write_text(
            "[default]\naws_access_key_id=dk\naws_secret_access_key=ds\n[work]\naws_access_key_id=wk\naws_secret_access_key=ws\n"
        )
        (tmp_path / "config").write_text("[profile work]\nregion = eu-central-1\n[profile empty]\nregion = x\n")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        work, default = s3_access(StorageOptions(profile="work")), s3_access(StorageOptions())
        assert work.provider is not None
        assert default.provider is not None
        assert (work.provider()["access_key_id"], work.region) == ("wk", "eu-central-1")
        assert default.provider()["access_key_id"] == "dk"
        with pytest.raises(ConfigError, match="no such profile"):
            s3_access(StorageOptions(profile="absent"))

    def test_google_and_azure(self, tmp_path: Path) -> None:
        path = tmp_path / "key.json"
        path.write_text("{}")
        assert gcs_config(StorageOptions(token=str(path)), {})[0] == {"application_credentials": str(path)}
        assert gcs_config(StorageOptions(token="ya29"), {})[0] == {"bearer_token": "ya29"}
        assert gcs_config(StorageOptions(anon=True), {})[0] == {"skip_signature": True}
        assert "GOOGLE" in gcs_config(StorageOptions(), {"GOOGLE_APPLICATION_CREDENTIALS": str(path)})[1]
        assert azure_config(StorageOptions(account_name="a", account_key="k"), {})[0] == {
            "account_name": "a", "account_key": "k"}  # fmt: skip
        assert azure_config(StorageOptions(account_name="a", sas_token="?sv=1"), {})[0]["sas_key"] == "sv=1"

    def test_making_a_storage_reads_no_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
        storage = Storage()
        with pytest.raises(ConfigError, match="expected http://host:port"):
            storage.read("s3://b/x")


class TestRetrying:
    POLICY = RetryPolicy(first_backoff_s=0.1, max_backoff_s=1.0, max_retries=5, deadline_s=60, unreachable_s=2.0)

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """A clock that only sleeping moves; the list of sleeps."""
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
        monkeypatch.setattr(random, "uniform", lambda low, high: high)  # the longest delays
        return slept

    def fail(self, *errors: BaseException):
        pending = iter(errors)

        def attempt() -> str:
            for error in pending:
                raise error
            return "done"

        return attempt

    def test_delays_grow_up_to_the_bound(self, clock: list[float]) -> None:
        assert retrying(self.POLICY, self.fail(*[TransientError("x") for _ in range(4)])) == "done"
        assert clock == pytest.approx([0.1, 0.4, 1.0, 1.0])

    def test_it_gives_up_after_max_retries(self, clock: list[float]) -> None:
        with pytest.raises(TransientError):
            retrying(self.POLICY, self.fail(*[TransientError("x") for _ in range(6)]))
        assert len(clock) == 5

    def test_progress_starts_the_count_anew_until_the_deadline(self, clock: list[float]) -> None:
        count = itertools.count()
        attempts: list[int] = []

        def attempt() -> None:
            attempts.append(1)
            raise TransientError("broke")

        with pytest.raises(TransientError):
            retrying(self.POLICY, attempt, progress=lambda: next(count))
        assert len(attempts) > 500
        assert 59 < sum(clock) <= 60

    def test_no_connection_is_given_up_early(self, clock: list[float]) -> None:
        with pytest.raises(UnreachableError):
            retrying(self.POLICY, self.fail(*[UnreachableError("x") for _ in range(99)]))
        assert clock == pytest.approx([0.1, 0.4, 1.0, 0.5])  # the last attempt is at the end of the two seconds

    def test_a_store_that_answered_meanwhile_was_not_away(self, clock: list[float]) -> None:
        errors = [UnreachableError("x"), TransientError("x"), *(UnreachableError("x") for _ in range(99))]
        with pytest.raises(UnreachableError):
            retrying(self.POLICY, self.fail(*errors))
        assert clock == pytest.approx([0.1, 0.4, 1.0, 1.0])  # two seconds from the third error on

    def test_other_errors_are_final(self, clock: list[float]) -> None:
        with pytest.raises(NotFoundError):
            retrying(self.POLICY, self.fail(NotFoundError("x")))
        assert clock == []


def test_importing_reads_no_environment_and_starts_no_thread() -> None:
    program = (
        "import os, threading\n"
        "seen = []\n"
        "old = type(os.environ).__getitem__\n"
        "import obstore, fsspec, braceexpand, numpy\n"
        "type(os.environ).__getitem__ = lambda self, name: (seen.append(name), old(self, name))[1]\n"
        "import streaming.storage\n"
        "assert not [name for name in seen if name.startswith(('AWS', 'GOOGLE', 'AZURE'))], seen\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_status_codes_inside_names_are_no_status_codes() -> None:
    missing = _translate("looking at memory://bucket-240118/x", parse_options({}), FileNotFoundError("bucket-240118/x"))
    assert type(missing) is NotFoundError
    other = _translate("reading memory://b/404a", parse_options({}), OSError("memory://b/x403x/401st went away"))
    assert not isinstance(other, (NotFoundError, AccessDeniedError))
    assert isinstance(_translate("reading x", parse_options({}), OSError("HTTP 403: no")), AccessDeniedError)


@pytest.mark.parametrize(
    ("names", "cure"),
    [
        (("index.json", "shard.00000.mds.zstd"), "Mosaic's MDS, which `shard_tools convert`"),
        (("index.json", "chunk-0-0.bin"), "LitData's chunks"),
        (("cat/1.jpg",), "it looks like images"),
        (
            ("meta/info.json", "data/chunk-000/file-000.parquet"),
            "a LeRobot set; make shards of it: shard_tools convert",
        ),
        (("robot/meta/info.json", "robot/data/a.parquet", "robot/videos/a.mp4"), "/robot/ TARGET"),
        (("meta/info.json", "other/a.parquet"), "it looks like Parquet"),
        (("data.bin", "_shardstream/chunks.parquet", ".git/x.png"), "check the prefix"),
        ((), "check the prefix"),
    ],
)
def test_files_of_other_formats_are_to_be_converted(tmp_path: Path, names: tuple[str, ...], cure: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    with pytest.raises(NotFoundError, match=re.escape(cure)):
        expand_urls(f"{tmp_path}/", Storage())
