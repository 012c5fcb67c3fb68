"""Split URLs and paths as users write them, join them, and show them without secrets.

A "directory" here has no trailing slash (except the root ``/``), so that ``join_url(*split_url(url)) == url``.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
from collections.abc import Collection
from urllib.parse import unquote

from streaming.errors import ConfigError, redact, redact_text

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]+):/")
_LEAST_SECRET = 4
"""Minimum length of a secret that is hidden outside URLs; shorter ones would hide ordinary words."""
HTTP_SCHEMES = frozenset({"http", "https"})
_HOST = re.compile(r"[A-Za-z0-9._~-]+")
_CONTROL, _BLANK = re.compile(r"[\x00-\x1f\x7f]"), re.compile(r"[\x00-\x20\x7f]")
_AZURE = dict.fromkeys(("az", "azure", "abfs", "abfss"), "account_key or sas_token")
_KEYS = {
    **dict.fromkeys(("s3", "s3a"), "key and secret, or profile"), **dict.fromkeys(("gs", "gcs"), "token"), **_AZURE,
}  # fmt: skip
"""Schemes of URLs that name a bucket, and the storage options that hold keys there."""


def scheme_of(url: str) -> str:
    """Return the scheme in lower case; ``"file"`` for plain paths."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else "file"


def local_path(url: str) -> str:
    """Return the path of a ``file:`` URL (percent-decoded), or the path itself.

    ``~`` is the user's home, as in a shell.

    Raises:
        ConfigError: It cannot be a path on any machine.
    """
    as_url(url or ".")
    if not _SCHEME.match(url):
        return os.path.expanduser(url) if url.startswith("~") else url
    rest = url.split(":", 1)[1]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in {"", "localhost"}:
            right = f"file:///{host.rpartition('@')[2]}{slash}{path}"
            raise ConfigError(f"{redact(url)}: a file URL names no host; write {right} or a plain path")
        rest = "/" + path
    return as_url(unquote(rest))


def split_query(url: str) -> tuple[str, str]:
    """Return ``url`` without its query string, and the query with its question mark; only http(s) URLs have one."""
    if scheme_of(url) not in HTTP_SCHEMES:
        return url, ""
    path, mark, query = url.partition("?")
    return path, mark + query


def split_url(url: str) -> tuple[str, str]:
    """Return directory and name of ``url``; a query string stays with the directory, so that joining restores it.

    ``"s3://b/dir/x.tar"`` → ``("s3://b/dir", "x.tar")``; ``"x.tar"`` → ``("", "x.tar")``.
    """
    match = _SCHEME.match(url)
    if match is None:
        cut = url.rfind("/")
        return (url[:cut] or "/" if cut >= 0 else "", url[cut + 1 :])
    scheme = match[1].lower()
    path, query = split_query(url) if scheme in HTTP_SCHEMES else (url, "")
    root = len(match[0])
    while path[root : root + 1] == "/":
        root += 1
    cut = path.rfind("/")
    if cut < root:
        return (path[:root] + query, path[root:]) if scheme == "file" else (path + query, "")
    return path[:cut] + query, path[cut + 1 :]


def join_url(base: str, *names: str) -> str:
    """Return ``base`` with ``names`` below it, exactly one slash between them; a query string stays at the end."""
    path, query = split_query(base)
    for name in names:
        path = name if not path else path + name if path.endswith("/") else f"{path}/{name}"
    return path + query


def checked_endpoint(name: str, url: str) -> str:
    """Check the URL of a server that replaces a cloud's own, and return it.

    For most URLs that are refused here, obstore panics, which is not an ``Exception`` (0.12.1).

    Args:
        name: Name of the option that holds the URL, for the message.
        url: The URL.

    Raises:
        ConfigError: The URL is malformed; the message names the place.
    """
    fault = "it begins otherwise" if not url.startswith(("http://", "https://")) else server_fault(url)
    if not fault and not (url.isascii() and url.isprintable() and " " not in url):
        fault = "there is a character in it that URLs cannot have; percent-encode it (a host's name as xn--…)"
    if not fault and ("?" in url or "#" in url):
        fault = "it has a query or fragment, which the address of a server has not"
    if fault:
        shown = redact(url if "://" in url else f"://{url}").removeprefix("://")
        raise ConfigError(f"{name} {shown!r}: expected http://host:port or https://host; {fault}")
    return url


def server_fault(url: str) -> str:
    """Describe the fault in host and port of an http(s) URL; "" if there is none."""
    server = url.partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2]
    if server.count(":") > 1 and "[" not in server:
        return "an IPv6 address needs brackets, as in http://[::1]:9000"
    host, colon, port = re.fullmatch(r"(.*?)(?:(:)([^:\]]*))?", server, re.DOTALL).groups("")  # type: ignore[union-attr]
    if colon and not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 1 << 16):
        return "its port is not a number from 1 to 65535"  # not shown: it may be part of a password
    return _host_fault(host)


def _host_fault(host: str) -> str:
    if not host:
        return "it names no host"
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1] if host.endswith("]") and "%" not in host else "")
        except ValueError:
            return "the text in brackets is not an IPv6 address without a zone"
    elif host.isascii() and not _HOST.fullmatch(host):
        return f"{host[:80]!r} is not a host name"
    return ""


def secrets_of(url: str) -> set[str]:
    """Return the parts of ``url`` that :func:`redact` hides, in the forms in which a client may repeat them."""
    path, _, query = url.partition("?")
    found = {part.partition("=")[2] for part in query.split("&")}
    user, at, _ = path.partition("://")[2].partition("/")[0].rpartition("@")
    if at:
        name, _, password = user.partition(":")
        plain = f"{unquote(name)}:{unquote(password)}"
        found |= {password or name, base64.b64encode(plain.encode()).decode()}
    return {text for one in found for text in (one, unquote(one)) if text}


def hidden_in(text: str, secrets: Collection[str]) -> str:
    """Return ``text`` with each occurrence of each secret replaced; very short ones stay."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "…") if len(secret) >= _LEAST_SECRET else text
    return text


def without_secrets(error: BaseException, secrets: Collection[str]) -> BaseException:
    """Return ``error`` as the cause of one of our errors, without the secrets in its text and in URLs there.

    If it contains a secret, a substitute with the same name, traceback and causes replaces it, because each type stores
    its text in a different way.
    """

    def shown(text: str) -> str:
        return redact_text(hidden_in(text, secrets))

    def safe(found: BaseException | None) -> BaseException | None:
        if found is None:
            return None
        cause, context = safe(found.__cause__), safe(None if found.__suppress_context__ else found.__context__)
        notes = [shown(note) for note in getattr(found, "__notes__", ())]
        texts = [str(found), repr(found)]
        if cause is found.__cause__ and context in (None, found.__context__) and [*map(shown, texts)] == texts:
            return found
        names = {"__module__": type(found).__module__, "__qualname__": type(found).__qualname__}
        other: BaseException = type(type(found).__name__, (Exception,), names)(shown(texts[0]))
        other.__cause__, other.__context__, other.__suppress_context__ = cause, context, found.__suppress_context__
        for note in notes:
            other.add_note(note)
        return other.with_traceback(found.__traceback__)

    return safe(error) or error


def bucket_and_key(url: str) -> tuple[str, str]:
    """Return bucket (or container, or host) and key of an object URL.

    Raises:
        ConfigError: There is no bucket, or the key has empty, ``.`` or ``..`` parts.
    """
    _, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    key = key.removesuffix("/")
    if not bucket:
        raise ConfigError(f"{redact(url)}: no bucket in this URL; write {scheme_of(url)}://bucket/key")
    if key and any(part in {"", ".", ".."} for part in key.split("/")):
        raise ConfigError(f"{redact(url)}: empty, '.' or '..' parts in a key are not supported; rename the object")
    return bucket, key


def as_url(url: str | os.PathLike[str]) -> str:
    """Return ``url`` as a string; paths are unchanged.

    Raises:
        ConfigError: It is not a URL or path, has characters that these cannot have, or names a user in place of a
            bucket, so that messages never show a secret as the bucket's name.
    """
    if not isinstance(url, (str, os.PathLike)) or not (text := os.fspath(url)):
        raise ConfigError(f"expected a URL or path, got {url!r}")
    if "\0" in text or (scheme_of(text) in HTTP_SCHEMES and _CONTROL.search(text)):
        what = "control character" if scheme_of(text) in HTTP_SCHEMES else "character NUL"
        raise ConfigError(f"{redact(text)!r}: there is a {what} in it, which no such name has; leave it out")
    for one in text.split("::"):
        if (scheme := scheme_of(one)) in _KEYS:
            _check_bucket(one, scheme)
    return text


def _check_bucket(url: str, scheme: str) -> None:
    """Check that a URL names no user before its bucket; Azure's may name ``container@account``.

    Raises:
        ConfigError: It does; the message does not show the URL, because a password in it may have a slash.
    """
    bucket = url.partition(":")[2].lstrip("/").partition("/")[0]
    if _BLANK.search(bucket):
        raise ConfigError(f"{redact(url)!r}: the bucket's name has a blank or a control character; leave it out")
    if ":" in bucket or ("@" in bucket and scheme not in _AZURE):
        raise ConfigError(
            f"{scheme}://…: a ':' or '@' is in the bucket's name; no user, key or password is read from this URL. "
            f"Write {scheme}://bucket/key, and give keys in storage_options ({_KEYS[scheme]}) or the environment"
        )


def looked_for(url: str) -> str:
    """Describe where a relative path is searched, to append to a message; "" for other URLs."""
    if _SCHEME.match(url) or url.startswith(("/", "~")):
        return ""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        return " (a relative path, and the working folder of this process was deleted; give an absolute one)"
    return f" (a relative path, looked for in {folder}; an absolute one stays right after os.chdir)"
