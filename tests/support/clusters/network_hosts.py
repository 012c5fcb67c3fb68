"""Hosts for tests: network namespaces with addresses of their own, joined by a bridge. Linux, root and iproute2.

A host here shares files and the clock with the others, and nothing of the network: what is sent between two hosts goes
through the bridge. The bridge is in a namespace of its own, so that the network of this machine does not change: a
browser, for one, gives up its requests when an interface appears. :meth:`Hosts.offer` brings a server of this process
to the hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from tests.support.processes.forked import enter


def why_not() -> str:
    """Why there can be no hosts here, or "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    probe = f"ss{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


class Host:
    """One namespace; its interface is ``eth0``."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    @property
    def network(self) -> Path:
        """The name space, for ``forked.Forked.start``."""
        return Path("/var/run/netns", self.name)

    def pids(self) -> list[int]:
        """All processes on this host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(line) for line in found.stdout.split()]

    def kill(self) -> None:
        """SIGKILL to every process on this host, until there is none."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Hosts:
    """``num_hosts`` hosts while the context lasts; leaving it kills what still runs on them.

    Attributes:
        hosts: The hosts.
        gateway: Address of the bridge, at which they find what is offered to them.
    """

    def __init__(self, num_hosts: int) -> None:
        number = os.getpid()
        self._between = Host(f"ss{number}bridge", "10.64.0.254")
        self.gateway = self._between.address
        self.hosts = [Host(f"ss{number}h{i}", f"10.64.0.{i + 1}") for i in range(num_hosts)]

    @contextlib.contextmanager
    def offer(self, port: int) -> Iterator[str]:
        """Bring a server at this port of loopback to the hosts; yields where they find it, as ``ADDRESS:PORT``."""

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):  # also where the server is gone
                there, back = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))

        async def relay_all(ended: asyncio.Event) -> None:
            async with await asyncio.start_server(relay, sock=listener):
                await ended.wait()

        with ThreadPoolExecutor(1) as elsewhere:  # a thread of its own may be in another namespace
            listener = elsewhere.submit(self._listen).result()
        with asyncio.Runner() as runner, ThreadPoolExecutor(1) as beside:
            loop, ended = runner.get_loop(), asyncio.Event()
            relayed = beside.submit(runner.run, relay_all(ended))
            try:
                yield f"{self.gateway}:{listener.getsockname()[1]}"
            finally:
                loop.call_soon_threadsafe(ended.set)
                relayed.result()

    def _listen(self) -> socket.socket:
        enter(str(self._between.network))
        return socket.create_server((self.gateway, 0), backlog=64)

    def __enter__(self) -> Self:
        between = self._between.name
        try:
            _ip("netns", "add", between)
            _ip("-n", between, "link", "add", "bridge", "type", "bridge")
            _ip("-n", between, "addr", "add", f"{self.gateway}/24", "dev", "bridge")
            _ip("-n", between, "link", "set", "bridge", "up")
            for i, host in enumerate(self.hosts):
                outer = f"host{i}"
                _ip("netns", "add", host.name)
                _ip("-n", between, "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host.name)
                _ip("-n", between, "link", "set", outer, "master", "bridge", "up")
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
                _ip("-n", host.name, "link", "set", "eth0", "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.kill()
        for place in (*self.hosts, self._between):
            subprocess.run(["ip", "netns", "del", place.name], capture_output=True, check=False)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write what is read, to its end."""
    with contextlib.closing(writer), contextlib.suppress(OSError):  # either side may be killed
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
