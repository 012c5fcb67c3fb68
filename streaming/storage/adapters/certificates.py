"""Read files of certificate authorities, and explain refused certificates and files, with cures."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from streaming.errors import ConfigError, shell_word

REFUSED = "InvalidCertificate"
"""Name of the error in obstore's text for a connection; a reason of the TLS library follows."""
_PRESENTED = re.compile(r'(?:DnsName\(\\?"|IpAddress\()([^"\\)]{1,253})')
_MOST_NAMES = 5
_BEGINS = b"-----BEGIN CERTIFICATE-----"


def why_refused(said: str, endpoint: str, authorities: str) -> str:
    """Return why the certificate of a server was refused, with a cure.

    Args:
        said: The text of obstore's error, which contains ``REFUSED``.
        endpoint: The server.
        authorities: The file of further authorities, and the option or variable that names it; "": none was given.
    """
    reason = said.partition(REFUSED)[2]
    host = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").hostname or endpoint
    if "CaUsedAsEndEntity" in reason:
        return _authority_as_server(host, authorities)
    if "NotValidForName" in reason:
        names = list(dict.fromkeys(_PRESENTED.findall(reason.partition("presented")[2])))[:_MOST_NAMES]
        return (
            f"its certificate is for {', '.join(names) or 'other names'}, not for {host}; use a name in the "
            "certificate, or have one made for this name, too"
        )
    if "NotValidYet" in reason or "Expired" in reason:
        when = "is not valid yet" if "NotValidYet" in reason else "has expired"
        return f"its certificate {when}; have it renewed, or set the clock of this machine"
    believed = f": the system's authorities count now, and those in {authorities}" if authorities else ""
    return f"its certificate is not trusted; give its authority as ca_file, or --ca-file to a command{believed}"


def _authority_as_server(host: str, authorities: str) -> str:
    """Explain that a server presents the certificate of an authority, and how to make one for a server."""
    try:
        kind = f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        kind = f"DNS:{host}"
    name = shell_word(f"subjectAltName={kind}")
    given = f"although {authorities} was read" if authorities else "whatever ca_file says"
    return (
        f"its certificate is one of an authority (CA:TRUE), which is not accepted as a server's own, {given}. Make one "
        "for a server: `openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=server -addext "
        f"basicConstraints=critical,CA:FALSE -addext {name} -keyout tls.key -out tls.crt`, give both files to the "
        "server, and tls.crt as ca_file"
    )


def read_authorities(path: str, name: str) -> bytes:
    """Read a file of further authorities.

    Args:
        path: The file.
        name: The option or variable that names it.

    Raises:
        ConfigError: It cannot be read, or holds no certificate.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (OSError, ValueError) as error:  # a value error: a path with the character NUL
        raise ConfigError(f"{name}: {error}") from error
    if _BEGINS not in data:
        raise ConfigError(
            f"no certificate in {path} ({name}): expected a PEM file with {_BEGINS.decode()} in it. Name the file of "
            "the authority's certificate, not of a key; `openssl x509 -inform der -in FILE` makes PEM of DER"
        )
    return data


def why_unusable(said: str, authorities: str) -> str:
    """Return why a client cannot be made with these further authorities; "": they are not the reason."""
    if not authorities or "builder error" not in said:
        return ""
    return (
        f"a certificate in {authorities} is damaged, or cut off; `openssl x509 -in FILE -noout -text` reads its first "
        "one. Get the file again"
    )
