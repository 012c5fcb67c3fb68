"""Decide who may ask the server: those who know its token, by its own address, and never another site's page."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from streaming.errors import ConfigError

COOKIE = "shardstream_show_{}"
"""Name of the cookie, with the port: cookies are not kept apart by port."""
_OWN_PAGES = ("same-origin", "none")  # of Sec-Fetch-Site: our own page, or the user
_WIDEST = ("0.0.0.0", "::")  # noqa: S104  only named here

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
"""Headers of every answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused, with its status."""

    status: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may ask.

    Attributes:
        host: Address that the server listens at.
        port: Its port.
        token: The secret in the address.
    """

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def cookie(self) -> str:
        """Name of the cookie that holds the token."""
        return COOKIE.format(self.port)

    @property
    def address(self) -> str:
        """Where the user begins."""
        host = socket.gethostname() if self.host in _WIDEST else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={self.token}"

    def refusal(
        self, method: str, headers: Mapping[str, str], cookies: Mapping[str, str], given: str, *, is_open: bool
    ) -> Refusal | None:
        """Return why a request is refused; None: it is not.

        Args:
            method: Its method.
            headers: Its headers, by names in lower case.
            cookies: Its cookies.
            given: The token in its address.
            is_open: It asks for what holds no data, such as the style.
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
            return _refused(HTTPStatus.FORBIDDEN, f"a page of another site asked ({site[:20]}); only own pages may")
        if is_open or self._knows(given, headers, cookies):
            return None
        return _refused(
            HTTPStatus.UNAUTHORIZED,
            "the token is missing or wrong; open the address that `shard_tools show` printed, or send it as "
            "`Authorization: Bearer …`",
        )

    def _knows(self, given: str, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        told = (given, bearer.strip() if scheme.lower() == "bearer" else "", cookies.get(self.cookie, ""))
        wanted = self.token.encode()
        return any(hmac.compare_digest(one.encode("utf-8", "surrogateescape"), wanted) for one in told)

    def _is_ours(self, host: str) -> bool:
        """Tell whether a header ``Host`` names this server; a name of another site would, by DNS, lead here, too."""
        name, colon, port = host.rpartition(":")
        if not colon or port != str(self.port):
            return False
        name = name.removeprefix("[").removesuffix("]").lower()
        names = {self.host.lower(), "localhost"} if is_loopback(self.host) else {self.host.lower()}
        if self.host in _WIDEST:
            names |= {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
            return name in names or _ip(name) is not None  # a number needs no DNS that could lie
        return name in names


def _refused(status: HTTPStatus, why: str) -> Refusal:
    return Refusal(status=int(status), message=why)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address."""
    found = _ip(host)
    return host == "localhost" or (found is not None and found.is_loopback)


def check_host(host: str, *, exposed: bool) -> None:
    """Refuse to listen where other machines reach the server, unless that is what the user says.

    Raises:
        ConfigError: They do and it is not said; or it is said and they do not.
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
