"""The pages of ``shard_tools show`` served from a thread of this process, and what a program reads of them."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any, Self
from urllib.parse import urlencode

import uvicorn

from shard_tools.show.access import Access
from shard_tools.show.base.subject import Subject
from shard_tools.show.server import _Site, listen
from shard_tools.show.table import MEDIA, PAGES


class Shown:
    """Serves a subject on loopback. A context, at whose end the server is gone and the subject closed."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._socket = listen("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self.access = Access(host="127.0.0.1", port=self.port)
        site = _Site(subject=subject, access=self.access, pages=PAGES, media=MEDIA)
        config = uvicorn.Config(site.app(), log_level="warning", access_log=False, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def get(self, path: str, **asked: object) -> tuple[int, Any]:
        """Status and JSON of a page."""
        status, body = self.text(path, format="json", **asked)
        return status, json.loads(body)

    def text(self, path: str, **asked: object) -> tuple[int, str]:
        """Status and text of a page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            query = urlencode({name: str(value) for name, value in asked.items() if value is not None})
            connection.request("GET", f"{path}?{query}", headers={"Authorization": f"Bearer {self.access.token}"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def address(self, path: str, **asked: object) -> str:
        """The address of a page, with the token."""
        query = urlencode({**{name: str(value) for name, value in asked.items()}, "token": self.access.token})
        return f"http://127.0.0.1:{self.port}{path}?{query}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._socket.close()
        self._subject.close()
