"""Remote readers in this process, actors without Ray; ranks in this process, as ``streaming.testing`` has them."""

from __future__ import annotations

import pytest

from streaming.others.remote import cluster
from streaming.others.remote.reader import RemoteReader
from streaming.testing.ranks import Play as Play  # noqa: PLC0414  tests take them from here
from streaming.testing.ranks import played as played  # noqa: PLC0414


def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a remote loader's readers work in this process, without Ray: what they return stands for its reference."""

    def end(reader: RemoteReader) -> None:
        for loader in reader._loaders:
            loader.close()

    monkeypatch.setattr(cluster, "check_connected", lambda: None)
    monkeypatch.setattr(cluster, "start", lambda reader, arguments, group: [reader(*given) for given in arguments])
    monkeypatch.setattr(cluster, "read", lambda reader, step, num_ranks: reader.read(step))
    monkeypatch.setattr(cluster, "ask", lambda reader, method, *args, **named: getattr(reader, method)(*args, **named))
    monkeypatch.setattr(cluster, "get", lambda refs, **_: refs)
    monkeypatch.setattr(cluster, "wait", lambda refs, timeout_s: True)
    monkeypatch.setattr(cluster, "kill", end)
