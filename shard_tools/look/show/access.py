"""Decide who may use the server: those who know its token, by its own address, and never another site's page."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from streaming.errors import ConfigError

_log = logging.getLogger("shard_tools.look.show")

COOKIE = "shardstream_show"
"""Name of a session's cookie."""
_MOST_SESSIONS = 1000
_OWN_PAGES = ("same-origin", "none")  # values of Sec-Fetch-Site: our own page, or the user
_WIDEST = ("0.0.0.0", "::")  # noqa: S104  only compared with

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "media-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Vary": "Cookie, Authorization",
}
"""Headers of every response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The reason to refuse a request, with its status."""

    status: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A browser that was admitted.

    Attributes:
        name: Secret part of its page addresses.
        cookie: Secret that the browser sends to these addresses only.
    """

    name: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)
    cookie: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def home(self) -> str:
        """The prefix of its addresses, and the path of its cookie."""
        return f"/s/{self.name}"


class Sessions:
    """The admitted browsers. Thread-safe.

    A browser sends cookies to all ports of a machine, and another user may listen at one. So the cookie is not the
    token, and it belongs to a secret path: at another port it is not sent, and without the path it opens nothing. All
    users see command lines, too: the address on a browser's command line admits only once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _sessions, _invited
        self._sessions: dict[str, Session] = {}
        self._invited: dict[str, str] = {}  # the session opened by each invitation; "": none so far

    def invite(self) -> str:
        """Return a secret that admits one browser, once."""
        made = secrets.token_urlsafe(24)
        with self._lock:
            # From here on the invitation is known, even after its use.
            self._invited[made] = ""
        return made

    def has_invited(self, given: str) -> bool:
        """Return whether this is an invitation, used or not."""
        with self._lock:
            # Invitations are never forgotten.
            return given in self._invited

    def open(self, invitation: str = "") -> Session | None:
        """Admit a browser; None: the invitation was used before, and the session that used it is closed."""
        made = Session()
        with self._lock:
            # If two browsers use one invitation, neither stays admitted, whichever comes first.
            used = self._invited.get(invitation, "")
            if used:
                self._sessions.pop(used, None)
            else:
                while len(self._sessions) >= _MOST_SESSIONS:
                    del self._sessions[next(iter(self._sessions))]
                self._sessions[made.name] = made
                if invitation:
                    self._invited[invitation] = made.name
        if used:
            _log.warning(
                "the address that the browser was started with was requested twice: another program of this machine "
                "may have read it. Its pages are closed. Open the address above"
            )
            return None
        return made

    def knows(self, name: str, cookies: Mapping[str, str]) -> bool:
        """Return whether these cookies belong to the session of this name."""
        with self._lock:
            # Closed sessions are not in the table.
            found = self._sessions.get(name)
        return found is not None and _is_same(cookies.get(COOKIE, ""), found.cookie)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Rules of access.

    Attributes:
        host: Address at which the server listens.
        port: Its port.
        token: The secret in the address that the terminal shows.
        sessions: Browsers that were let in.
    """

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    sessions: Sessions = field(default_factory=Sessions, repr=False)

    @property
    def address(self) -> str:
        """The address to start with."""
        return self._with(self.token)

    def address_for_browser(self) -> str:
        """Return an address that admits once, for a command line, which other users of this machine can see."""
        return self._with(self.sessions.invite())

    def _with(self, token: str) -> str:
        host = socket.gethostname() if self.host in _WIDEST else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={token}"

    def opens(self, method: str, headers: Mapping[str, str], given: str) -> bool:
        """Return whether an accepted request begins a session: a browser's request does, a program's does not."""
        if method != "GET" or not given:
            return False
        mode = headers.get("sec-fetch-mode")
        is_page = "text/html" in headers.get("accept", "") if mode is None else mode == "navigate"
        return self.sessions.has_invited(given) or is_page

    def let_in(self, given: str) -> Session | Refusal:
        """Return a new session for a caller with the token or an unused invitation."""
        made = self.sessions.open(given if self.sessions.has_invited(given) else "")
        return made or _refused(
            HTTPStatus.UNAUTHORIZED,
            "this address let in once, and was used before; open the address that `shard_tools show` printed",
        )

    def refusal(
        self, method: str, headers: Mapping[str, str], cookies: Mapping[str, str], given: str, *, session: str = "",
        is_open: bool,
    ) -> Refusal | None:  # fmt: skip
        """Return why a request is refused; None: it is accepted.

        Args:
            method: Its method.
            headers: Its headers, by names in lower case.
            cookies: Its cookies.
            given: The token in its address, or an invitation, which only :meth:`let_in` accepts.
            session: The session in its address.
            is_open: The request is for something without data, such as the style.
        """
        if method not in {"GET", "HEAD"}:
            return _refused(
                HTTPStatus.METHOD_NOT_ALLOWED, f"got {method}; only GET and HEAD are served, nothing is changed"
            )
        host = headers.get("host", "")
        if not self._is_ours(host):
            return _refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"Host is {host[:80]!r}, which is not the name of this server; expected the address that "
                f"`shard_tools show` printed",
            )
        site = headers.get("sec-fetch-site", "none")
        goes_there = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if site not in _OWN_PAGES and not goes_there:
            return _refused(HTTPStatus.FORBIDDEN, f"a page of another site sent this ({site[:20]}); only own pages may")
        if is_open or self._knows(given, headers) or self.sessions.knows(session, cookies):
            return None
        if method == "GET" and not session and self.sessions.has_invited(given):
            return None
        return _refused(
            HTTPStatus.UNAUTHORIZED,
            "the token is missing or wrong; open the address that `shard_tools show` printed, or send it as "
            "`Authorization: Bearer …`",
        )

    def _knows(self, given: str, headers: Mapping[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        candidates = (given, bearer.strip() if scheme.lower() == "bearer" else "")
        return any(_is_same(one, self.token) for one in candidates)

    def _is_ours(self, host: str) -> bool:
        """Return whether a ``Host`` header names this server; by DNS, a name of another site could lead here, too."""
        name, colon, port = host.rpartition(":")
        if not colon or port != str(self.port):
            return False
        name = name.removeprefix("[").removesuffix("]").lower()
        names = {self.host.lower(), "localhost"} if is_loopback(self.host) else {self.host.lower()}
        if self.host in _WIDEST:
            names |= {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
            return name in names or _ip(name) is not None  # a numeric address involves no DNS
        return name in names


def _is_same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


def _refused(status: HTTPStatus, why: str) -> Refusal:
    return Refusal(status=int(status), message=why)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    found = _ip(host)
    return host == "localhost" or (found is not None and found.is_loopback)


def check_host(host: str, *, exposed: bool) -> None:
    """Refuse to listen where other machines reach the server, unless the user asked for it.

    Raises:
        ConfigError: They reach it without ``exposed``; or ``exposed`` is set and they do not reach it.
    """
    if is_loopback(host):
        if exposed:
            raise ConfigError(
                f"--expose has no effect with --host {host}, which only this machine reaches. Leave it out."
            )
        return
    if not exposed:
        raise ConfigError(
            f"--host {host}: other machines would reach the samples there, without encryption. If that is meant, give "
            f"--expose, too; safer: keep the default, and forward the port (ssh -L PORT:127.0.0.1:PORT machine)"
        )
