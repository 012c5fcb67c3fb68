"""Hosts for tests: network namespaces with addresses of their own, joined by a bridge. Linux, root and iproute2.

A host here shares files and the clock with the others, and nothing of the network: what is sent between two hosts goes
through the bridge. This process is on the bridge, too, at ``Hosts.gateway``: a store for all of them can listen there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Self


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
    """``num_hosts`` hosts while the context lasts; leaving it kills what still runs on them."""

    def __init__(self, num_hosts: int) -> None:
        number = os.getpid()
        self._bridge = f"ssb{number % 10**8}"
        self._network = f"10.{64 + number // 250 % 64}.{number % 250}"
        self.gateway = f"{self._network}.254"
        self.hosts = [Host(f"ss{number}h{i}", f"{self._network}.{i + 1}") for i in range(num_hosts)]

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for i, host in enumerate(self.hosts):
                outer = f"v{self._bridge[3:]}n{i}"
                _ip("netns", "add", host.name)
                _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host.name)
                _ip("link", "set", outer, "master", self._bridge, "up")
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
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
