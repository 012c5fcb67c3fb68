"""The pages of ``shard_tools show`` over a set, served on a thread of this process, and asked by a plain client."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

from shard_tools.look.show.access import Access
from shard_tools.look.show.base.subject import Subject, open_subject
from shard_tools.look.show.decoding.workers import DecodingWorkers
from shard_tools.look.show.server import listen, serve
from shard_tools.look.show.table import MEDIA, PAGES
from tests.support.processes.waiting import PATIENCE_S


def opened_patiently(urls: Sequence[str], **options: Any) -> Subject:
    """Open what pages show; what is decoded late is decoded, too."""
    subject = open_subject(urls, **options)
    subject.keep("workers", lambda: DecodingWorkers(PATIENCE_S))
    return subject


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(eq=False)
class Shown:
    """A context: the server runs within it, over the subject that these arguments open."""

    urls: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.subject = opened_patiently(self.urls, **self.options)
        self._listening = listen("127.0.0.1", 0)
        self.access = Access(host="127.0.0.1", port=self._listening.getsockname()[1])
        self.root = f"http://127.0.0.1:{self.access.port}"
        self._stop: Any = None
        began = threading.Event()

        def note(stop: Any) -> None:
            self._stop = stop
            began.set()

        self._thread = threading.Thread(
            target=serve, args=(self.subject, self._listening, self.access),
            kwargs={"pages": PAGES, "media": MEDIA, "began": note},
        )  # fmt: skip
        self._thread.start()
        assert began.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._listening.close()
        self.subject.close()

    @property
    def address(self) -> str:
        """Where the user begins."""
        return self.access.address

    def within(self, page: Any) -> str:
        """What addresses begin with in a browser that was let in, and shows this page."""
        found = re.match(rf"{re.escape(self.root)}/s/[\w-]+", page.url)
        assert found is not None, page.url
        return found[0]

    def ask(self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET") -> Answered:
        """One request, exactly as given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.access.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            response = connection.getresponse()
            return Answered(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None, /, **parameters: Any) -> Answered:
        """Ask with the token, in the header."""
        given = [f"{name}={quote(str(value), errors='surrogateescape')}" for name, value in parameters.items()]
        whole = path + ("&" if "?" in path else "?") * bool(given) + "&".join(given)
        return self.ask(whole, {"Authorization": f"Bearer {self.access.token}", **(headers or {})})

    def json(self, path: str, /, **parameters: Any) -> Any:
        """Ask for JSON, and expect that it is given."""
        found = self.get(path, format="json", **parameters)
        assert found.status == 200, found.text
        return found.json
