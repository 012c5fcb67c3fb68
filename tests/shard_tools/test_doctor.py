"""``shard_tools doctor``: what is seen of machine, packages and store, what is wrong, and that it tells no secret."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import shard_tools.__main__ as program
from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.doctor import judge, machine, packages, run, store
from shard_tools.look.doctor.machine import Machine
from shard_tools.look.doctor.packages import PackageState
from shard_tools.look.doctor.store import StoreLook
from streaming.common.platforms import group_limits
from streaming.errors import ConfigError
from tests.support.code.folders import ROOT
from tests.support.processes.waiting import until
from tests.support.servers.on_loopback import MiniS3Server, free_port
from tests.support.sets.data_sets import write_set

pytestmark = pytest.mark.thorough

GOOD = Machine(
    system="Linux", python="3.13.1", cores=8, cores_there=8, quota_cores=None, memory_bytes=64 << 30,
    memory_left_bytes=60 << 30, is_memory_limited=False, shm_bytes=32 << 30, shm_left_bytes=32 << 30,
    descriptors=65_536, most_descriptors=1 << 20, cache_dir="/scratch", cache_left_bytes=1 << 40,
    is_cache_writable=True, is_home_writable=True, start_method="fork",
)  # fmt: skip
IMPATIENT = ("--storage-option", "unreachable_s=0.01", "--storage-option", "max_retries=0")


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is wrong, whatever these tests run on."""
    monkeypatch.setattr(run, "look_at_machine", lambda cache_dir: GOOD)
    monkeypatch.setattr(run, "look_at_packages", lambda *, imports: ())


def doctor(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["doctor", *map(str, arguments)], prog_name="shard_tools")
    assert result.exit_code == code, result.output
    return result


def told(*arguments: object, code: int = 0) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(doctor(*arguments, "--json", code=code).stdout)
    return report


# ------------------------------------------------------------------------------------------------ the machine


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return str(root)


def test_limits_of_control_groups_of_version_2(tmp_path: Path) -> None:
    """The tightest of all levels counts, and page cache that can be dropped is no use of memory."""
    files = {
        "proc/self/cgroup": "0::/pods/one",
        "sys/fs/cgroup/pods/cpu.max": "150000 100000",
        "sys/fs/cgroup/pods/memory.max": str(8 << 30),
        "sys/fs/cgroup/pods/memory.current": str(2 << 30),
        "sys/fs/cgroup/pods/one/cpu.max": "max 100000",
        "sys/fs/cgroup/pods/one/memory.max": str(4 << 30),
        "sys/fs/cgroup/pods/one/memory.current": str(3 << 30),
        "sys/fs/cgroup/pods/one/memory.stat": f"anon 5\ninactive_file {1 << 30}",
    }
    found = group_limits(write(tmp_path, files))
    assert (found.cores, found.memory_bytes, found.memory_left_bytes) == (1.5, 4 << 30, 2 << 30)


def test_limits_of_control_groups_of_version_1(tmp_path: Path) -> None:
    """In a container the path is that of the host, and the files of its own group stand at the top."""
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(1 << 30),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(1 << 20),
    }
    found = group_limits(write(tmp_path, files))
    assert (found.cores, found.memory_bytes, found.memory_left_bytes) == (0.5, 1 << 30, (1 << 30) - (1 << 20))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"},
        {
            "proc/self/cgroup": "2:memory:/\n3:cpu:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        {"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "", "sys/fs/cgroup/memory.max": "nonsense"},
    ],
)
def test_no_limit_of_control_groups(tmp_path: Path, files: dict[str, str]) -> None:
    found = group_limits(write(tmp_path, files))
    assert (found.cores, found.memory_bytes, found.memory_left_bytes) == (None, None, None)


def test_this_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = machine.look_at_machine(f"{tmp_path}/not/yet/there")
    assert found.cache_dir == "~/not/yet/there"
    assert 1 <= found.cores <= found.cores_there
    assert found.memory_bytes > 1 << 20
    assert (found.memory_left_bytes or 1) <= found.memory_bytes
    assert found.cache_left_bytes
    assert (found.is_cache_writable, found.is_home_writable) == (True, True)
    assert 0 < found.descriptors <= found.most_descriptors


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: real(path, mode) and mode != os.W_OK)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = machine.look_at_machine(str(tmp_path))
    assert (found.is_cache_writable, found.is_home_writable) == (False, False)
    (one,) = judge.troubles((), replace(GOOD, is_cache_writable=False), None, launcher="", ranks_here=1)
    assert str(one) == "disk: /scratch cannot be written; give another folder as cache_dir="
    assert any("--journal" in line for line in judge.limits(replace(GOOD, is_home_writable=False), None))


@pytest.mark.parametrize(
    ("kind", "change", "ranks", "words"),
    [
        ("cores", {"quota_cores": 2.5}, 1, "the time of 2.5 cores, but 8 cores .* 4 threads .*num_threads=2"),
        ("memory", {"memory_bytes": (5 << 30) - 1}, 1, '1 loader may buffer up to 4.0 GiB .*memory_limit="2559MiB"'),
        ("memory", {"memory_bytes": 32 << 30}, 8, '8 loaders may buffer up to 32.0 GiB .*memory_limit="2048MiB"'),
        ("shm", {"shm_bytes": 64 << 20}, 1, r"/dev/shm has 64.0 MiB.*--shm-size=8g"),
        ("descriptors", {"descriptors": 256}, 1, "256 descriptors open; `ulimit -n 65536`"),
        ("descriptors", {"descriptors": 256, "most_descriptors": 512}, 1, "have the hard limit raised"),
        ("disk", {"cache_left_bytes": 1 << 20}, 1, "1.0 MiB are free at /scratch"),
    ],
)
def test_what_is_wrong_with_a_machine(kind: str, change: dict[str, Any], ranks: int, words: str) -> None:
    (one,) = judge.troubles((), replace(GOOD, **change), None, launcher="", ranks_here=ranks)
    assert one.kind == kind
    assert re.search(words, str(one)), one


def test_nothing_is_wrong_at_the_borders() -> None:
    enough = replace(
        GOOD, quota_cores=4.0, memory_bytes=5 << 30, shm_bytes=512 << 20, descriptors=1024, cache_left_bytes=1 << 30
    )
    assert judge.troubles((), enough, None, launcher="", ranks_here=1) == ()
    assert judge.troubles((), replace(GOOD, shm_bytes=None), None, launcher="", ranks_here=1) == ()
    (one,) = judge.troubles((), GOOD, None, launcher="RANK=x", ranks_here=1)
    assert str(one) == "launcher: RANK=x"


# ------------------------------------------------------------------------------------------------ packages


def test_each_extra_says_what_it_is_for_and_its_modules_are_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {*packages.GIVES} == {*extras} - {"all", "dev", "docs"}
    lines = list(project["dependencies"])
    lines += [f"{one}; extra == '{name}'" for name, some in extras.items() for one in some]
    wanted = packages.required(lines)
    assert wanted["torch"][1] == wanted["numpy"][1] == ()
    assert wanted["opencv-python-headless"] == ("4.9", ("images",))
    assert wanted["jinja2"][1] == ("text", "show")
    assert not {"pytest", "furo", "shardstream"} & wanted.keys()
    found = {one.name: one for one in packages.look_at_packages(imports=False)}
    assert all(one.version for one in found.values() if not one.extras), "a package that is needed is not found"
    assert [one for one in found.values() if one.error or one.is_too_old] == []


def test_requirements_as_metadata_writes_them() -> None:
    lines = ["torch>=2.4", "ray (>=2.49) ; extra == 'ray'", 'a[b] >=1,<2; python_version >= "3" and extra == "x"', "c"]
    assert packages.required(lines) == {
        "torch": ("2.4", ()), "ray": ("2.49", ("ray",)), "a": ("1", ("x",)), "c": ("", ()),
    }  # fmt: skip
    assert packages.required(["d>=1; extra == 'x'", "d>=1"])["d"] == ("1", ())


@pytest.mark.thorough
def test_imports_that_fail_end_the_process_or_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = tmp_path / "hangs"

    def run(command: list[str], *, timeout: float, check: bool, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """As ``subprocess.run``, but the time is up when an import hangs, and not before."""
        with subprocess.Popen(command, **options) as process:
            until(lambda: process.poll() is not None or hangs.exists(), "a process ends, or hangs")
            if process.poll() is None:
                process.kill()
            said, _ = process.communicate()
        if hangs.exists():
            hangs.unlink()
            raise subprocess.TimeoutExpired(command, timeout, said)
        return subprocess.CompletedProcess(command, process.returncode, said)

    monkeypatch.setattr(packages, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
    texts = {
        "doctor_good": "print('noise')\n__version__ = '1.2'\n",
        "doctor_fails": "raise OSError('libfoo.so.1: cannot open shared object file')\n",
        "doctor_exits": "raise SystemExit(3)\n",
        "doctor_dies": "import os\nos.abort()\n",
        "doctor_hangs": f"import pathlib, time\npathlib.Path({str(hangs)!r}).touch()\ntime.sleep(3600)\n",
        "doctor_last": "",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = packages.try_imports([*texts], timeout_s=2.0)
    assert [found[name]["error"] for name in texts] == [
        "",
        "OSError: libfoo.so.1: cannot open shared object file",
        "SystemExit: 3",
        "the process that imports it was killed by SIGABRT",
        "its import takes longer than 2 s",
        "",
    ]
    assert found["doctor_good"]["version"] == "1.2"


def state(name: str = "numpy", **changes: Any) -> PackageState:
    return replace(PackageState(name=name, extras=(), version="2.0", least="1.26"), **changes)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (state(version=""), "numpy is not installed; `pip install 'numpy>=1.26'`"),
        (state("torch", version=""), "torch is not installed: training needs it, the commands do not; "),
        (state(version="1.3.0rc1"), "numpy 1.3.0rc1 is older than 1.26, which is needed; `pip install -U"),
        (state(error="ImportError: x"), "numpy 2.0 cannot be imported: ImportError: x; `pip install --force-reinst"),
        (state("cv2", extras=("images",), error="x"), r"cv2 2.0 (extra images) cannot be imported: x"),
    ],
)
def test_what_is_wrong_with_a_package(one: PackageState, words: str) -> None:
    (found,) = judge.troubles([one], GOOD, None, launcher="", ranks_here=1)
    assert str(found).startswith(f"package: {words}")


def test_nothing_is_wrong_with_these() -> None:
    fine = [state(version="1.26"), state(version="1.26.0"), state(version="2"), state(extras=("x",), version="")]
    fine += [state("torch", version="2.13.0+cpu", least="2.4"), state(least=""), state(version="unknown", least="")]
    assert packages.troubles_of(fine) == []


def test_mosaic_beside_us_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.metadata, "version", lambda name: "0.13.0")
    ((what, cure),) = packages.troubles_of([])
    assert "mosaicml-streaming is also installed" in what
    assert "pip uninstall mosaicml-streaming" in cure


def test_where_the_commands_cannot_start_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = state("obstore", error="ImportError: GLIBC_2.99 not found")
    monkeypatch.setitem(sys.modules, "shard_tools.cli", None)
    monkeypatch.setattr(packages, "look_at_packages", lambda *, imports: (broken,) if imports else ())
    with pytest.raises(SystemExit) as ended:
        program.main()
    said = str(ended.value.code)
    assert said.startswith("the commands cannot start: ModuleNotFoundError: import of shard_tools.cli halted")
    assert "- obstore 2.0 cannot be imported: ImportError: GLIBC_2.99 not found; `pip install --force-re" in said
    monkeypatch.setattr(packages, "look_at_packages", lambda *, imports: ())
    with pytest.raises(ModuleNotFoundError):
        program.main()


def test_packages_are_shown(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (
        state(),
        state("torch", says={"cuda": "13.0", "devices": 2}),
        state("cv2", extras=("images",), error="ImportError: libGL.so.1"),
        state("tokenizers", extras=("text",)),
        state("tiktoken", extras=("text",), version=""),
        state("ray", extras=("ray",), version=""),
    )
    monkeypatch.setattr(run, "look_at_packages", lambda *, imports: found)
    shown = doctor(code=1).stdout
    for line in (
        "packages      numpy 2.0, torch 2.0",
        "torch         CUDA 13.0, 2 devices",
        "[images]      cv2 BROKEN",
        "[text]        tokenizers 2.0; without tiktoken",
        "[ray]         not installed (readers on Ray, and --engine ray)",
        "- package: cv2 2.0 (extra images) cannot be imported: ImportError: libGL.so.1; `pip install",
    ):
        assert line in shown, shown
    report = told(code=1)
    assert report["ok"] is False
    assert report["extras"]["text"] == {"for": "convert --tokenizer", "missing": ["tiktoken"]}
    assert report["packages"][1]["says"] == {"cuda": "13.0", "devices": 2}


# ------------------------------------------------------------------------------------------------ a store


@pytest.fixture(scope="module")
def s3() -> Iterator[MiniS3Server]:
    with MiniS3Server(("bucket",)) as server:
        for folder, index in (("good", True), ("bare", False)):
            with ShardWriter(
                f"s3://bucket/{folder}/{{:06d}}.tar", max_samples=4, storage_options=server.storage_options, index=index
            ) as writer:
                for number in range(8):
                    writer.write({"__key__": f"{number:03d}", "txt": "some text " * 2000})
        yield server


def how(server: MiniS3Server, **changes: object) -> list[str]:
    options = {**server.storage_options, **changes}
    return [part for name, value in options.items() for part in ("--storage-option", f"{name}={value}")]


def test_a_set_in_a_store(healthy: None, s3: MiniS3Server) -> None:
    report = told("s3://bucket/good/", *how(s3))
    assert (report["ok"], report["findings"]) == (True, [])
    seen = report["store"]
    assert (seen["num_shards"], seen["num_samples"], seen["client"]) == (2, 8, "obstore")
    assert seen["endpoint"] == s3.url
    assert seen["credentials"] == "the storage options key and secret"
    assert "the default" in seen["region"] or "storage option" in seen["region"]
    assert 0 <= seen["read_s"] < 10
    assert abs(seen["clock_s"] or 0) < 3
    assert any(line.startswith("store: 64 requests at once for chunks of") for line in report["limits"])
    shown = doctor("s3://bucket/good/", *how(s3)).stdout
    assert "shards        2, found in " in shown
    assert shown.endswith("nothing wrong was found\n")
    assert s3.storage_options["secret"] not in shown


def test_a_set_without_an_index(healthy: None, s3: MiniS3Server) -> None:
    (one,) = told("s3://bucket/bare/", *how(s3), code=1)["findings"]
    assert one["kind"] == "index"
    assert "shard_tools index" in one["what"]


def test_wrong_credentials_are_said_without_them(healthy: None, s3: MiniS3Server) -> None:
    result = doctor("s3://bucket/good/", *how(s3, secret="hunter2"), code=3)
    assert "- store: " in result.stdout
    assert "access denied" in result.stdout
    assert "credentials   the storage options key and secret" in result.stdout
    assert "hunter2" not in result.output


def test_a_host_that_nobody_answers_at(healthy: None, s3: MiniS3Server) -> None:
    report = told("s3://bucket/good/", *how(s3, endpoint_url=f"http://127.0.0.1:{free_port()}"), *IMPATIENT, code=3)
    (one,) = report["findings"]
    assert one["kind"] == "store"
    assert "connection" in one["what"]
    assert report["store"]["clock_s"] is None


@pytest.mark.parametrize("url", ["s3://bucket/none/", "s3://nobucket/x/"])
def test_what_is_not_there(healthy: None, s3: MiniS3Server, url: str) -> None:
    (one,) = told(url, *how(s3), code=3)["findings"]
    assert one["kind"] == "store"
    assert url.rstrip("/") in one["what"]


def test_a_local_set_in_the_folder_of_this_user(healthy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    samples = write_set(tmp_path / "set", (8, 8))
    report = told(samples.url)
    assert report["store"]["url"].startswith("~/set")
    assert (report["store"]["clock_s"], report["store"]["num_shards"]) == (None, 2)
    assert str(tmp_path) not in json.dumps(report)
    (Path(tmp_path) / "set" / "_shardstream" / "chunks.parquet").write_bytes(b"damaged")
    (one,) = told(samples.url, code=1)["findings"]
    assert one["kind"] == "index"
    assert str(tmp_path) not in one["what"]
    missing = told(tmp_path / "none", code=3)
    assert str(tmp_path) not in json.dumps(missing)


def test_a_set_that_is_being_written(healthy: None, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", max_samples=1) as writer:
        writer.write({"__key__": "a", "txt": "x"})
        writer.write({"__key__": "b", "txt": "x"})
        (one,) = told(tmp_path, code=1)["findings"]
        assert one["kind"] == "index"
        assert "ShardWriter" in one["what"]
    assert told(tmp_path)["findings"] == []


def test_an_option_that_there_is_not_is_wrong_usage(healthy: None) -> None:
    doctor("s3://bucket/x/", "--storage-option", "nonsense=1", code=2)
    with pytest.raises(ConfigError):
        run.doctor(["s3://bucket/x/"], storage_options={"nonsense": 1})


def test_what_limits_name_is_done(tmp_path: Path) -> None:
    url = write_set(tmp_path / "set", (8,)).url
    for words in (["bench", url, "--seconds", "0.3"], ["stats", url, "--all", "--journal", str(tmp_path / "sums")]):
        result = CliRunner().invoke(cli, words, prog_name="shard_tools")
        assert result.exit_code == 0, result.output


# ------------------------------------------------------------------------------------------------ its clock


@pytest.fixture
def late_server() -> Iterator[tuple[str, dict[str, str]]]:
    """A server, and the headers that it answers with."""
    headers: dict[str, str] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(403)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", headers
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_clock_that_differs(late_server: tuple[str, dict[str, str]]) -> None:
    url, headers = late_server
    for seconds in (-3600, 0, 100):
        headers["Date"] = formatdate(time.time() + seconds, usegmt=True)
        ahead = store.clock_ahead_s(url)
        assert ahead is not None
        assert abs(ahead - seconds) < 3
    headers["Date"] = "some day"
    assert store.clock_ahead_s(url) is None
    headers.clear()
    assert store.clock_ahead_s(url) is None


@pytest.mark.parametrize(
    "endpoint", ["", "none", "http://…@[", "http://127.0.0.1:0", "ftp://host", "http://127.0.0.1:x"]
)
def test_where_no_clock_is_told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **more: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr("socket.create_connection", refused)
    assert store.clock_ahead_s(endpoint) is None


@pytest.mark.parametrize(
    ("ahead", "words"), [(900.2, "900 s behind the"), (-61, "61 s ahead of the"), (60, ""), (-2, "")]
)
def test_a_clock_that_is_wrong(ahead: float, words: str) -> None:
    found = judge.troubles((), GOOD, StoreLook(url="s3://b/", clock_s=ahead), launcher="", ranks_here=1)
    assert [one.kind for one in found] == (["clock"] if words else [])
    assert all(words in one.what for one in found)
