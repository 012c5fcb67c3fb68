"""Names and options of other libraries: what an import, an attribute or a call says, and that it is true."""

from __future__ import annotations

import ast
import copy
import importlib.util
import pickle
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

import shard_tools
import streaming
from shard_tools import ShardWriter, optimize
from shard_tools.cli import cli
from streaming import Mixture, StreamingDataset
from streaming.common.migration_hints.names import LIBRARIES, PACKAGES, Library
from streaming.errors import OptionError
from tests.support.code.folders import ROOT

FOREIGN = [library for library in LIBRARIES if library.name]
OWN = LIBRARIES[0]
NAMED = [(library, name) for library in LIBRARIES for name in library.names]
_OURS = re.compile(r"(?<!`)\b((?:streaming|shard_tools|infra)(?:\.\w+)+)")
_NO_REPLACEMENT = re.compile(r"^(leave it out|write |give |join |torch's own |sets are |samples are |our names )")


def asked(package: str, name: str) -> AttributeError:
    with pytest.raises(AttributeError) as caught:
        getattr(import_module(package), name)
    return caught.value


@pytest.mark.parametrize("library", FOREIGN, ids=lambda one: one.page)
def test_every_name_is_on_the_page_that_its_message_names(library: Library) -> None:
    page = (ROOT / "docs" / "coming-from" / f"{library.page}.md").read_text()
    code = " ".join(re.findall(r"`([^`\n]+)`", page))
    assert len(library.names) >= 5
    assert [name for name in library.names if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.parametrize(("library", "name"), NAMED, ids=lambda one: one if isinstance(one, str) else one.page)
def test_what_stands_here_for_a_name_exists(library: Library, name: str) -> None:
    said = library.names[name]
    ours = [one.rstrip(".") for one in _OURS.findall(said)]
    for path in ours:
        pkgutil.resolve_name(path)
    verbs = re.findall(r"`shard_tools (\w+)", said)
    assert {*verbs} <= cli.commands.keys()
    assert ours or verbs or _NO_REPLACEMENT.match(said), said


def test_names_are_those_of_the_library() -> None:
    webdataset, datasets = pytest.importorskip("webdataset"), pytest.importorskip("datasets")
    import_module("datasets.distributed")
    by_page = {library.page: library.names for library in FOREIGN}
    assert [name for name in by_page["webdataset"] if not hasattr(webdataset, name)] == []
    assert [name for name in by_page["torch"] if not hasattr(torch.utils.data, name)] == ["StatefulDataLoader"]
    theirs = {*dir(datasets), *dir(datasets.distributed)}
    assert by_page["datasets"].keys() - theirs == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_what_an_attribute_says(package: str) -> None:
    module = import_module(package)
    for library, name in NAMED:
        if hasattr(module, name):
            assert name in module.__all__ or name == "map" or library is OWN, (package, name)
            continue
        said = str(asked(package, name))
        assert said.startswith(f"{package} has no {name}")
        assert library.name in said
        assert f"docs/coming-from/{library.page}.md" in said or library is OWN
        assert library.names[name] in said


def test_a_name_of_two_libraries_says_both() -> None:
    said = str(asked("streaming", "StreamingDataLoader"))
    assert "which is Mosaic Streaming's and LitData's. Here: streaming.DataLoader, which" in said
    assert said.endswith("(docs/coming-from/mosaic.md, docs/coming-from/litdata.md)")


def test_a_name_of_ours_in_the_other_package() -> None:
    assert str(asked("streaming", "ShardWriter")) == "streaming has no ShardWriter: it is shard_tools.ShardWriter"
    assert str(asked("shard_tools", "Mixture")) == "shard_tools has no Mixture: it is streaming.Mixture"


def test_imports_are_left_to_python() -> None:
    """No finder of ours: an import of a name that is not here fails as with any package."""
    before = [*sys.meta_path]
    with pytest.raises(ImportError, match=r"^cannot import name 'MDSWriter' from 'streaming'"):
        exec("from streaming import MDSWriter", {})
    for code in ("import streaming.base", "import streaming.bases", "import MDSWriter"):
        with pytest.raises(ModuleNotFoundError, match=r"^No module named"):
            exec(code, {})
    assert not [finder for finder in before if getattr(finder, "__module__", "").startswith("streaming")]
    with pytest.raises(AttributeError, match=r"^module 'streaming' has no attribute 'Nothing'$"):
        streaming.Nothing  # noqa: B018
    assert importlib.util.find_spec("streaming.base") is None
    assert importlib.util.find_spec("streaming.loader") is not None


@pytest.mark.parametrize("module", [streaming, shard_tools])
def test_what_asks_for_attributes_is_answered_as_ever(module: Any) -> None:
    assert not hasattr(module, "MDSWriter")
    assert getattr(module, "MDSWriter", 7) == 7
    assert {*module.__all__} <= {*dir(module)}
    assert not {"MDSWriter", "WebDataset"} & {*dir(module)}
    for name in module.__all__:
        assert pickle.loads(pickle.dumps(getattr(module, name))) is getattr(module, name)
    with pytest.raises(AttributeError, match="MDSWriter"):
        pickle.loads(f"c{module.__name__}\nMDSWriter\n.".encode())
    assert copy.copy(streaming.StreamingDataset) is streaming.StreamingDataset


def test_no_similar_name_is_guessed_where_the_right_one_is_known() -> None:
    code = "import streaming; streaming.WebDataset"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert "which is webdataset's. Here: streaming.StreamingDataset reads" in ran.stderr
    assert "Did you mean" not in ran.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_no_name_that_is_not_there(package: str) -> None:
    """A ``__getattr__`` that they see would make every name one of any type."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    hidden = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING"]
    inside = {one.name for node in hidden for one in node.body if isinstance(one, ast.FunctionDef)}
    assert "__getattr__" in inside
    assert "__getattr__" not in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}


OPTIONS: list[tuple[Callable[..., object], str, str]] = [
    (StreamingDataset, "remote", "give the URL as the first argument"),
    (StreamingDataset, "local", "write cache_dir= for the folder on disk"),
    (StreamingDataset, "num_canonical_nodes", r"write shuffle=ShuffleConfig\(lanes=…\)"),
    (StreamingDataset, "shuffle_block_size", r"write shuffle=ShuffleConfig\(window=…\)"),
    (StreamingDataset, "predownload", "memory_limit=…"),
    (StreamingDataset, "streams", "give a Mixture to the loader"),
    (StreamingDataset, "drop_last", r"DataLoader\(dataset, drop_last=…\)"),
    (StreamingDataset, "input_dir", "give the URL as the first argument"),
    (StreamingDataset, "max_pre_download", "memory_limit=…"),
    (StreamingDataset, "cache_size", "write cache_limit=…"),
    (Mixture, "iterate_over_all", 'write ends="all" or "first"'),
    (Mixture, "batching_method", 'write batches="one_source"'),
    (ShardWriter, "out", "give the shards as the first argument"),
    (ShardWriter, "size_limit", "write max_bytes=…"),
    (ShardWriter, "maxcount", "write max_samples=…"),
    (optimize, "output_dir", "give it as the third argument"),
    (optimize, "chunk_bytes", "write max_bytes=…"),
    (optimize, "num_workers", "write workers=…"),
    (optimize, "worker", "did you mean 'workers'"),
]


@pytest.mark.parametrize(("call", "option", "cure"), OPTIONS, ids=lambda one: getattr(one, "__name__", one))
def test_options_of_other_libraries(call: Callable[..., object], option: str, cure: str) -> None:
    with pytest.raises(OptionError, match=f"no option '{option}'.*{cure}") as caught:
        partial(call, **{option: 1})()
    assert isinstance(caught.value, TypeError)


def test_methods_of_other_data_sets_and_loaders_are_told(tmp_path: Any) -> None:
    with ShardWriter(f"{tmp_path}/{{}}.tar") as writer:
        for number in range(4):
            writer.write({"__key__": str(number), "cls": number})
    dataset = StreamingDataset(str(tmp_path))
    with streaming.DataLoader(dataset, batch_size=2) as loader:
        for owner, kind in ((dataset, "of_datasets"), (loader, "of_loaders")):
            known = [(library.page, *one) for library in FOREIGN for one in getattr(library, kind).items()]
            assert len({name for _, name, _ in known}) == len(known) > 8
            for page, name, cure in known:
                assert not hasattr(owner, name)
                with pytest.raises(AttributeError, match=re.escape(f"{cure} (docs/coming-from/{page}.md)")):
                    getattr(owner, name)
            with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
                _ = owner.nonsense
        assert not hasattr(dataset, "__deepcopy__")
        assert len(copy.copy(dataset)) == len(pickle.loads(pickle.dumps(dataset))) == 4


def test_a_property_that_fails_is_not_said_to_be_missing() -> None:
    class Broken(streaming.StreamingDataset):
        @property
        def labels(self) -> object:
            return object().no_such_thing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = Broken.__new__(Broken).labels
