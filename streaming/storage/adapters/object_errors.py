"""Translate obstore's errors: the only module that interprets them.

obstore has few types and puts the rest into text, so the text is matched here (0.8 to 0.12). Of the server's XML only
code and message are repeated: a full answer may contain a session token or a signed query.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from streaming.errors import AccessDeniedError, ConfigError, NotFoundError, ShardstreamError, StorageError, redact
from streaming.storage.adapters.certificates import REFUSED, why_refused, why_unusable
from streaming.storage.adapters.obstore_client import client
from streaming.storage.base.adapter import (
    RESUMED,
    ChangedError,
    FinalError,
    KeyRefusedError,
    RangeIgnoredError,
    ThrottledError,
    TransientError,
    UnreachableError,
)
from streaming.storage.base.urls import hidden_in, scheme_of, secrets_of, without_secrets

CONNECTING = "connecting to"
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_DELETE_FAILED = "request failed for key "
_BULK_CODE = re.compile(r"[A-Za-z0-9]{1,60}")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_EXPECTED_REGION = re.compile(r"expecting '([a-z0-9-]{1,40})'|<Region>([a-z0-9-]{1,40})</Region>")
_REGION_CODES = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_KEY_CODES = {
    *_EXPIRED_CODES,
    "InvalidAccessKeyId",
    "InvalidToken",
    "InvalidTokenId",
    "SignatureDoesNotMatch",
    "AuthenticationFailed",
    "AuthenticationRequired",
    "InvalidAuthenticationInfo",
}
"""Codes for a refused key, not for a missing permission: of S3, Google and Azure, in this order."""
_DENIED_CODES = {"AccessDenied", *_KEY_CODES}
_IS_EXPIRED = re.compile(r"\bexpired\b", re.IGNORECASE)
_OUTSIDE_TIME = "not valid in the specified time frame"
"""Azure's words for an expired signature, after its message."""
_NOT_RENEWED = re.compile(r"External \w{1,20} credential provider: ([^\n]{1,500})")
_PASSING_CODES = {"InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling"}
_PASSING_STATUS = {408, 409, 425, 429}
_BUSY_STATUS = {429, 503}
_BUSY_CODES = ("SlowDown", "Throttling", "ServerBusy", "TooManyRequests")
_MOST_LOOKED_AT = 4096
"""Characters of a response that are searched for words."""
_ROLE_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "fd00:ec2::254")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlace:
    """The target of a request, in words for messages, and its secrets.

    Attributes:
        forget: Makes the next request look up its keys again; None: there is nowhere to look.
        proxy: The proxy, and the variable that sets it; "": none.
        authorities: The file of further certificate authorities, and what names it; "": none.
    """

    url: str = field(repr=False)
    endpoint: str
    source: str
    region: str | None = None
    span: str = ""
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    forget: Callable[[], None] | None = field(default=None, repr=False)
    proxy: str = ""
    authorities: str = ""

    @property
    def through(self) -> str:
        """The proxy as words after the endpoint."""
        return f" through the proxy {self.proxy}" if self.proxy else ""

    def with_range(self, start: int, stop: int | None) -> RequestPlace:
        """Return the same for a byte range."""
        return replace(self, span=f" bytes [{start}, {'end' if stop is None else stop})")

    def __str__(self) -> str:
        return f"{redact(self.url)}{self.span}"


class AnswerError(Exception):
    """What a server answered to a request that was not obstore's: its status, and what it said."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class NoConnectionError(OSError):
    """There is no connection at all; the message says why."""


@contextmanager
def object_errors(place: RequestPlace, doing: str) -> Iterator[None]:
    """Raise our errors in place of obstore's. The original stays as ``__cause__``, without secrets.

    Where access was denied it does not: the answer may repeat what was signed, in a form that is not known.
    """
    try:
        yield
    except ShardstreamError:
        raise
    except NoConnectionError as error:
        raise UnreachableError(_unreachable(f"{doing} {place}", place, str(error))) from error
    except (client().errors.BaseError, AnswerError, FileNotFoundError, ValueError, PermissionError) as error:
        ours = _translate(place, doing, error)
        if isinstance(ours, AccessDeniedError):
            raise ours from None
        raise ours from without_secrets(error, place.secrets | secrets_of(place.url))
    except OSError as error:
        cause = without_secrets(error, place.secrets | secrets_of(place.url))
        raise TransientError(f"{doing} {place}: {_hinted(place, str(cause))}; endpoint {place.endpoint}") from cause
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust: its type has no public name
            raise
        cause = without_secrets(error, place.secrets | secrets_of(place.url))
        raise FinalError(
            f"{doing} {place}: the library obstore failed over it ({str(cause)[:300]}); check the URL, and "
            f"endpoint_url, region and key, for characters that cannot stand there; endpoint {place.endpoint}"
        ) from cause


def is_unsupported(error: Exception) -> bool:
    """Tell whether a store, or obstore, says that it cannot do what was asked for."""
    head = str(error).partition("Debug source:")[0]
    return isinstance(error, client().errors.NotSupportedError) or _status_of(error, head) == 501


def _translate(  # noqa: PLR0911 (one return for each kind)
    place: RequestPlace, doing: str, error: Exception
) -> ShardstreamError:
    """Return the error to raise for ``error``."""
    errors = client().errors
    text = str(error)
    head, _, debug = text.partition("Debug source:")
    status = _status_of(error, head)
    code = found[1] if (found := _CODE.search(text)) else ""
    said = _said(status, code, text)
    if undeleted := _undeleted(head):
        status, code, said = _bulk_delete(*undeleted)
    where = f"{doing} {place}"
    if any(host in head for host in _ROLE_HOSTS) and not any(host in place.endpoint for host in _ROLE_HOSTS):
        return AccessDeniedError(_no_credentials(where, place))
    if code in _REGION_CODES or "incorrectly configured region" in head:
        return AccessDeniedError(_wrong_region(where, place, text, said))
    if isinstance(error, FileNotFoundError) or status == 404:
        return NotFoundError(_not_found(where, place, code))
    denied = isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError))
    if denied or code in _DENIED_CODES or status in {401, 403}:
        return _refusal(place, doing, _Answer(status=status, code=code, said=said, text=text))
    if isinstance(error, errors.PreconditionError) or status == 412:
        return ChangedError(f"{where}: the object changed while it was read; write shards under new names")
    if status in {200, 206} or isinstance(error, errors.NotSupportedError) or any(one in debug for one in _NO_RANGE):
        return RangeIgnoredError(
            f"{where}: the server does not answer byte ranges as asked; use a server or proxy that supports Range "
            "requests, or copy the data to one"
        )
    if status == 416:
        return ChangedError(f"{where}: the range begins past the object's end; was the object replaced or truncated?")
    if isinstance(error, ValueError) or doing == CONNECTING:  # nothing has been sent yet
        return ConfigError(f"{where}: {_why_unsent(place, head)}")
    return _transfer_error(where, place, status, said, text)


def _why_unsent(place: RequestPlace, head: str) -> str:
    """Return why a client cannot be made, or a request."""
    if "Account must be specified" in head:
        return (
            "the storage account has no name; give account_name in storage_options, set AZURE_STORAGE_ACCOUNT_NAME, or "
            "write az://container@account.blob.core.windows.net/key"
        )
    return why_unusable(head, place.authorities) or hidden_in(head.strip()[:300], place.secrets)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A store's response: its status, its code, both with its message in short, and the full text."""

    status: int
    code: str
    said: str
    text: str

    @property
    def is_expired(self) -> bool:
        """Whether it says that a key has expired. It repeats the URL, which may hold any word."""
        return self.code in _EXPIRED_CODES or bool(_IS_EXPIRED.search(self.said)) or _OUTSIDE_TIME in self.text


def _refusal(place: RequestPlace, doing: str, answer: _Answer) -> AccessDeniedError:
    """Return the error for a request that was denied."""
    if not_renewed := _NOT_RENEWED.search(answer.text.partition("Debug source:")[0]):
        answer = replace(answer, said=f" ({not_renewed[1]})")
    elif answer.code not in _KEY_CODES and answer.status != 401 and not answer.is_expired:
        return AccessDeniedError(_denied(place, doing, answer.said))
    return KeyRefusedError(_key_refused(place, doing, answer), place.forget)


def _denied(place: RequestPlace, doing: str, said: str, again: str = "") -> str:
    return (
        f"{doing} {place}: access denied{said}; the credentials came from {place.source}{again}; endpoint "
        f"{place.endpoint}{place.through}. Check that they are right and may do this; storage_options takes key and "
        "secret, profile, or anon=True"
        + (". To read without listing, name the shards, as in {000000..000099}.tar" if doing == "listing" else "")
    )


def _key_refused(place: RequestPlace, doing: str, answer: _Answer) -> str:
    """Return the message for a refused key, after a second look-up if its source allows one."""
    again = "" if place.forget is None else ", and were looked up there once more"
    if not answer.is_expired:
        then = "If the key was good before, it has expired or was replaced: renew it, then start again"
        return f"{_denied(place, doing, answer.said, again)}. {then}: {RESUMED}"
    return (
        f"{doing} {place}: the key has expired{answer.said}; the credentials came from {place.source}{again}; endpoint "
        f"{place.endpoint}. Renew them ({_cure_of_expired(place.source)}), then start again: {RESUMED}"
    )


def _cure_of_expired(source: str) -> str:
    if "profile" in source.lower():
        return "`aws sso login`, or what made the profile's session"
    if "storage option" in source:
        return "a key in the storage options is never renewed: give a profile or a role, which are"
    if source.startswith("the URL"):
        return "a signed URL is never renewed: sign it for longer, or give the store's own URL and a key"
    return f"at {source}"


def _status_of(error: Exception, head: str) -> int:
    if isinstance(error, AnswerError):
        return error.status
    return int(found[1]) if (found := _STATUS.search(head)) else 0


def _undeleted(head: str) -> tuple[str, str] | None:
    """Return message and code for a key that a bulk delete failed on; None: ``head`` is another message.

    It ends with ``KEY: MESSAGE (code: CODE)``; the key may hold any characters.
    """
    begun, _, code = head.rstrip().rpartition(" (code: ")
    _, found, rest = begun.partition(_DELETE_FAILED)
    if not (found and ": " in rest and code.endswith(")") and _BULK_CODE.fullmatch(code, 0, len(code) - 1)):
        return None
    return rest.rpartition(": ")[2].strip()[:300], code[:-1]


def _bulk_delete(message: str, code: str) -> tuple[int, str, str]:
    """Return status, code and message for one key that a bulk delete failed on, although it was answered with 200."""
    said = f" ({code}: {message})" if message else f" ({code})"
    if code.isdigit():  # Azure gives the status here
        return int(code), "", said
    if code in {"NoSuchKey", "NoSuchVersion"}:
        return 404, code, said
    if code in _DENIED_CODES:
        return 403, code, said
    return 503 if code in _PASSING_CODES else 400, code, said


def _transfer_error(where: str, place: RequestPlace, status: int, said: str, text: str) -> StorageError:
    """Make an error for the remaining cases: transport faults, and unforeseen answers."""
    head, _, debug = text.partition("Debug source:")
    if why := _why_final(status, head, debug):
        return FinalError(f"{where}: {why}; endpoint {place.endpoint}{place.through}")
    if status in _PASSING_STATUS or (status >= 500 and status not in {501, 505}):
        busy = status in _BUSY_STATUS or any(f" {code}" in said for code in _BUSY_CODES)
        kind = ThrottledError if busy else TransientError
        return kind(f"{where}: the store is busy or failing{said}; endpoint {place.endpoint}")
    if status:
        return StorageError(f"{where}: the store refused{said}; endpoint {place.endpoint}")
    if REFUSED in debug:
        why = why_refused(debug, place.endpoint, place.authorities)
        return UnreachableError(f"{where}: cannot reach {place.endpoint}{place.through}: {why}")
    if "kind: Connect," in debug:  # the comma excludes ConnectionReset
        reason = next((words for token, words in _REASONS if token in debug), "no connection")
        return UnreachableError(_unreachable(where, place, reason))
    reason = next((words for token, words in _REASONS if token in debug), "the transfer broke off")
    return TransientError(f"{where}: {_hinted(place, reason)}; endpoint {place.endpoint}{place.through}")


def _why_final(status: int, head: str, debug: str) -> str:
    """Return why a retry cannot succeed; "": it may."""
    if (status == 400 and _WANTS_TLS.search(head[:_MOST_LOOKED_AT])) or _NOT_HTTP.search(debug):
        return "the server answers, but not over plain HTTP: write https:// in its place"
    if status == 407:
        return "the proxy wants a user and password (407): write both before its host in the variable that names it"
    final = next((words for token, words in _FINAL if token in debug), "")
    return f"{final} ({head.strip()[:300]!r})" if final and "InvalidPath" in debug else final


def _hinted(place: RequestPlace, reason: str) -> str:
    """Return a reason, with a hint if the server may expect TLS instead of plain HTTP."""
    ends_so = place.endpoint.startswith("http://") and reason in {_RESET, _CLOSED}
    return f"{reason} (if that port speaks TLS, write https://)" if ends_so else reason


_RESET, _CLOSED = "the connection was reset", "the connection was closed before an answer"
_WANTS_TLS = re.compile(r"(?:to an HTTPS server|to HTTPS port|SSL-enabled server port)", re.IGNORECASE)
"""Answers of Go, nginx and Apache to plain HTTP at a TLS port; other servers send an alert, or close the connection."""
_NOT_HTTP = re.compile(r"Parse\(\s{0,200}Version\b")
_REASONS = (
    ("ProxyAuthRequired", "it wants a user and password"),
    ("TunnelUnsuccessful", "it refuses to connect there"),
    ("dns error", "the name does not resolve"),
    ("Name or service not known", "the name does not resolve"),
    ("ConnectionRefused", "connection refused"),
    ("IncompleteBody", "the answer ended early"),
    ("UnexpectedEof", "the answer ended early"),
    ("ConnectionReset", _RESET),
    ("IncompleteMessage", _CLOSED),
    ("TimedOut", "no byte came for read_timeout_s"),
)
_NO_RANGE = ("NotPartial", "UnexpectedRange", "NoContentRange", "ParseContentRange")
"""The answer to a range request is not a range, or does not state its position and the total size."""
_BAD_KEY = (
    "a key there cannot be named here: it has an empty part ('//'), '.' or '..' as a part, or a control character. "
    "Name the shards themselves, with braces such as {000000..000099}.tar, or rename that object"
)
_FINAL = (
    ("InvalidContentType", "the server does not speak TLS at that port: write http://, or its port for https://"),
    ("InvalidPath", _BAD_KEY),
    ("TooManyRedirects", "the server redirects more than ten times, in a circle perhaps; check the URL"),
    ("kind: Redirect", "the server redirects to somewhere that cannot be followed; check the URL"),
    ("InvalidListResponse", "the answer is not a listing; check endpoint_url, and that it is a store of this kind"),
    *(
        (token, f"the answer {words}, which is needed; use a server or proxy that does, or copy the data to one")
        for token, words in (
            ("MissingContentLength", "does not say its length"),
            ("InvalidContentLength", "gives a length that is not a number"),
            ("MissingLastModified", "does not say when the object was changed"),
            ("InvalidLastModified", "gives an invalid date for the object's last change"),
            ("BadHeader", "has a header that is not text"),
        )
    ),
)
"""Kinds of answers that will not change when repeated, by obstore's names."""


def _said(status: int, code: str, text: str) -> str:
    """Return a short form of the server's answer: status, code and message."""
    message = found[1].strip() if (found := _MESSAGE.search(text)) else ""
    words = " ".join(word for word in (str(status) if status else "", code) if word)
    return f" ({words}{': ' if words and message else ''}{message})" if words or message else ""


def _unreachable(where: str, place: RequestPlace, reason: str) -> str:
    if place.proxy:
        return (
            f"{where}: cannot reach {place.endpoint}{place.through} ({reason}); check that proxy, or name the store's "
            "host in NO_PROXY"
        )
    return (
        f"{where}: cannot reach {place.endpoint} ({reason}); check endpoint_url, the network, and that the server runs"
    )


def _not_found(where: str, place: RequestPlace, code: str) -> str:
    if code in {"NoSuchBucket", "ContainerNotFound"}:
        bucket = place.url.partition("://")[2].partition("/")[0]
        return f"{where}: no bucket {bucket!r} at {place.endpoint}; check its name, and endpoint_url in storage_options"
    return f"{where}: no such object at {place.endpoint}; check the URL, and list what lies beside it"


def _wrong_region(where: str, place: RequestPlace, text: str, said: str) -> str:
    found = _EXPECTED_REGION.search(text)
    right = (found[1] or found[2]) if found else None
    cure = f"region={right!r}" if right else "the bucket's region as region="
    return (
        f"{where}: the bucket is not in region {place.region}{said}; give {cure} in storage_options, or set AWS_REGION"
    )


def _no_credentials(where: str, place: RequestPlace) -> str:
    cure = next((cure for schemes, cure in _KEYS if scheme_of(place.url) in schemes), _KEYS[0][1])
    return f"{where}: no credentials found; tried {place.source}. Give {cure}, or anon=True for public data"


_KEYS = (
    (
        ("s3", "s3a"),
        "key and secret or profile in storage_options, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    (("gs", "gcs"), "token (a key file) in storage_options, set GOOGLE_APPLICATION_CREDENTIALS"),
    (
        ("az", "azure", "abfs", "abfss"),
        (
            "account_name and account_key or sas_token in storage_options, set AZURE_STORAGE_ACCOUNT_NAME and "
            "AZURE_STORAGE_ACCOUNT_KEY"
        ),
    ),
)
"""What gives credentials, by the schemes of a store."""
