"""Find the credentials for requests: the only module that reads the environment, when a store is first used.

For s3 the order is: ``anon``; ``key`` and ``secret``; ``profile``; the environment's key; the environment's or default
profile (if boto3 is installed); web identity and container roles; the instance's role. The source that was used is kept
as text for error messages; the credentials themselves are never kept.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from streaming.errors import AccessDeniedError, ConfigError
from streaming.storage.adapters.profile_keys import ProfileKeys
from streaming.storage.base.adapter import TransientError
from streaming.storage.base.options import StorageOptions
from streaming.storage.base.urls import checked_endpoint

_IS_HEARD = re.compile(r"AWS_.*|SSL_CERT_.*|.*_PROXY", re.IGNORECASE)
"""Variables that an obstore client may read when it is made."""
_SPARED = "NO_PROXY"
"""Variable that lists hosts reached without a proxy; like the others, in upper or lower case."""
_CURE_OF_PROFILES = "run `aws configure` or `aws sso login`, or mend the program that makes its keys"
_MOST_QUOTED = 1_000
_ANON = "no credentials (anon=True)"
_KEY_PAIR = "the storage options key and secret"
_TOKEN = "the storage option token"  # noqa: S105 (words)
_ACCOUNT_KEY = "the storage option account_key"
_SAS_TOKEN = "the storage option sas_token"  # noqa: S105 (words)
_KEY_PAIR_OF_AWS = (("AWS_ACCESS_KEY_ID",), ("AWS_SECRET_ACCESS_KEY",))
_PRINCIPAL_OF_AZURE = (
    ("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET"),
    ("AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID"),
    ("AZURE_TENANT_ID", "AZURE_STORAGE_TENANT_ID", "AZURE_AUTHORITY_ID", "AZURE_STORAGE_AUTHORITY_ID"),
)
"""Parts of a key in the environment, and the variables of each part; an id alone selects a managed identity."""
GIVEN = frozenset({_ANON, _KEY_PAIR, _TOKEN, _ACCOUNT_KEY, _SAS_TOKEN})
"""Sources whose key never changes; all others may give another key later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Access:
    """How to reach an s3 bucket.

    ``environ`` is the environment that was read. ``provider`` returns credentials in obstore's form. None: obstore uses
    the role that ``source`` names, or sends no credentials if ``anonymous``.
    """

    source: str
    region: str
    region_source: str
    endpoint_url: str | None
    anonymous: bool = False
    provider: Callable[[], Any] | None = field(default=None, repr=False)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def identity(self) -> str | None:
        """Digest of everything that determines the credentials; None: a file may determine them."""
        if self.provider is not None and not isinstance(self.provider, _Fixed):
            return None
        given = None if self.provider is None else self.provider()
        heard = [item for item in self.environ.items() if _IS_HEARD.fullmatch(item[0])]
        return hashlib.blake2b(repr((self.source, given, sorted(heard))).encode("utf-8", "replace")).hexdigest()


def s3_endpoint(options: StorageOptions, environ: Mapping[str, str]) -> str | None:
    """Return the endpoint that replaces AWS's own, if any."""
    places = (
        ("endpoint_url", options.endpoint_url),
        *((name, environ.get(name)) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
    )
    name, found = next(((name, value) for name, value in places if value), ("", None))
    return checked_endpoint(name, found).rstrip("/") if found else None


def _given_endpoint(options: StorageOptions) -> str | None:
    return checked_endpoint("endpoint_url", options.endpoint_url) if options.endpoint_url else None


def s3_access(options: StorageOptions, environ: Mapping[str, str] | None = None) -> S3Access:
    """Return credentials, region and endpoint for s3, from ``options`` and ``environ`` (default: this process's).

    Raises:
        ConfigError: The profile needs boto3, which is missing, or does not exist.
        AccessDeniedError: The profile has no credentials.
    """
    environ = os.environ if environ is None else environ
    source, provider, profile_region = _s3_source(options, environ)
    endpoint_url = s3_endpoint(options, environ)
    regions = (
        (options.region, "the storage option region"),
        (environ.get("AWS_REGION"), "AWS_REGION"),
        (environ.get("AWS_DEFAULT_REGION"), "AWS_DEFAULT_REGION"),
        (profile_region, "the profile"),
        ("us-east-1", "the default"),
    )
    region, region_source = next((value, where) for value, where in regions if value)
    return S3Access(
        source=source,
        region=region,
        region_source=region_source,
        endpoint_url=endpoint_url,
        anonymous=options.anon,
        provider=provider,
        environ=environ,
    )


def _s3_source(  # noqa: PLR0911 (one return for each source, in order)
    options: StorageOptions, environ: Mapping[str, str]
) -> tuple[str, Callable[[], Any] | None, str | None]:
    """Return a description of the source, the provider if we must make it, and the region if the source sets one."""
    if options.anon:
        # An obstore client refuses half a key in the environment, even if it signs nothing.
        return _ANON, _Fixed("none", "none", None) if _half(environ, _KEY_PAIR_OF_AWS) else None, None
    if options.key is not None and options.secret is not None:
        return _KEY_PAIR, _Fixed(options.key, options.secret, options.token), None
    if options.profile is not None:
        return _from_profile(options.profile, f"the AWS profile {options.profile!r}", needed=True)
    key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        fixed = _Fixed(key, secret, environ.get("AWS_SESSION_TOKEN"))
        return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", fixed, None
    if name := environ.get("AWS_PROFILE"):
        return _from_profile(name, f"AWS_PROFILE={name}", needed=True)
    if half := _half(environ, _KEY_PAIR_OF_AWS):
        raise ConfigError(f"{half}. Set both, neither, or AWS_PROFILE; or give key and secret in storage_options")
    if _has_aws_files(environ):
        found = _from_profile(None, "the default AWS profile", needed=False)
        if found[1] is not None:
            return found
    return _role(options, environ), None, None


def _role(options: StorageOptions, environ: Mapping[str, str]) -> str:
    """Describe the role whose key obstore requests."""
    for name, words in (
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "web identity (AWS_WEB_IDENTITY_TOKEN_FILE)"),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "the container's role"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "the container's role"),
    ):
        if environ.get(name):
            return words
    half = "; the storage option token is given without key and secret" if options.token else ""
    return f"the instance's role (no key in the storage options, the environment or ~/.aws{half})"


def _half(environ: Mapping[str, str], parts: Sequence[tuple[str, ...]]) -> str:
    """Describe which part of a key the environment has, and which it lacks; "": it has all parts or none.

    Args:
        environ: The environment.
        parts: The variables of each part; one of them is enough.
    """
    found = [next((name for name in names if environ.get(name)), "") for names in parts]
    missing = [names[0] for names, name in zip(parts, found, strict=True) if not name]
    if not missing or not any(found):
        return ""
    return f"the environment has {' and '.join(filter(None, found))}, but not {' and '.join(missing)}"


class _Fixed:
    """Given credentials in obstore's form, hidden from ``repr``."""

    def __init__(self, key: str, secret: str, token: str | None) -> None:
        self._answer = {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}

    def __call__(self) -> Mapping[str, object]:
        return self._answer


def _has_aws_files(environ: Mapping[str, str]) -> bool:
    names = (
        environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(os.path.exists(os.path.expanduser(name)) for name in names)


def _from_profile(name: str | None, words: str, *, needed: bool) -> tuple[str, Callable[[], Any] | None, str | None]:
    """Return credentials of a named profile (static, SSO, assumed role, process), refreshed by boto3."""
    try:
        import boto3  # noqa: PLC0415 (optional)
        import botocore.exceptions  # noqa: PLC0415
    except ImportError as error:
        if not needed:
            return words, None, None
        raise ConfigError(f"{words}: AWS profiles need boto3; pip install 'shardstream[aws]'") from error
    try:
        session = boto3.Session(profile_name=name)
        credentials = session.get_credentials()
        if credentials is None:
            if not needed:
                return words, None, None
            raise AccessDeniedError(f"{words}: it has no credentials; {_CURE_OF_PROFILES}")
        return words, ProfileKeys(credentials), session.region_name
    except botocore.exceptions.ProfileNotFound as error:
        raise ConfigError(
            f"{words}: no such profile in the AWS configuration; `aws configure list-profiles`"
        ) from error
    except botocore.exceptions.HTTPClientError as error:
        raise TransientError(f"{words}: its keys come from a server that cannot be reached: {error}") from error
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, RuntimeError) as error:
        raise AccessDeniedError(
            f"{words}: it gives no key: {str(error).strip()[:_MOST_QUOTED]}; {_CURE_OF_PROFILES}"
        ) from error


def gcs_config(options: StorageOptions, environ: Mapping[str, str] | None = None) -> tuple[dict[str, Any], str]:
    """Return obstore's configuration for gs, and a description of the source of its credentials."""
    environ = os.environ if environ is None else environ
    named = environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    if named and options.token in {None, "anon"} and not os.path.exists(named):  # a client reads it even for anon
        raise ConfigError(f"GOOGLE_APPLICATION_CREDENTIALS: no such file: {named}; name the key file, or unset it")
    config: dict[str, Any] = {"base_url": _given_endpoint(options)} if options.endpoint_url else {}
    if options.anon or options.token == "anon":  # noqa: S105 (gcsfs's word for none)
        return {**config, "skip_signature": True}, _ANON
    if options.token is not None:
        path = os.path.expanduser(options.token)
        if os.path.exists(path):
            return {**config, "application_credentials": path}, "the key file of the storage option token"
        return {**config, "bearer_token": options.token}, _TOKEN
    if named:
        return config, "GOOGLE_APPLICATION_CREDENTIALS"
    return (
        config,
        "application default credentials (gcloud auth application-default login) or the instance's account",
    )


def azure_config(options: StorageOptions, environ: Mapping[str, str] | None = None) -> tuple[dict[str, Any], str]:
    """Return obstore's configuration for az, and a description of the source of its credentials."""
    environ = os.environ if environ is None else environ
    given = {"account_name": options.account_name, "endpoint": _given_endpoint(options)}
    config: dict[str, Any] = {name: value for name, value in given.items() if value}
    if options.anon:
        return {**config, "skip_signature": True}, _ANON
    if options.account_key:
        return {**config, "account_key": options.account_key}, _ACCOUNT_KEY
    if options.sas_token:
        return {**config, "sas_key": options.sas_token.lstrip("?")}, _SAS_TOKEN
    if options.token:
        return {**config, "token": options.token}, _TOKEN
    if environ.get("AZURE_STORAGE_ACCOUNT_KEY") or environ.get("AZURE_STORAGE_KEY"):
        return config, "AZURE_STORAGE_ACCOUNT_KEY"
    half = _half(environ, _PRINCIPAL_OF_AZURE) if any(map(environ.get, _PRINCIPAL_OF_AZURE[0])) else ""
    return config, f"the environment's AZURE_* variables, or the managed identity{half and f' ({half})'}"


def s3_endpoint_of_process(options: StorageOptions) -> str | None:
    """Call :func:`s3_endpoint` with this process's environment."""
    return s3_endpoint(options, os.environ)


def ca_bundle(options: StorageOptions, environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the file of further certificate authorities, and the option that names it; both "" if there is none."""
    environ = os.environ if environ is None else environ
    if options.ca_file is not None:
        return options.ca_file, "storage option ca_file"
    found = environ.get("AWS_CA_BUNDLE", "")
    return found, "AWS_CA_BUNDLE" if found else ""


def proxy_of(url: str, environ: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """Return the variable that sets a proxy for the server of an http(s) URL, and the proxy; None: no proxy."""
    environ = os.environ if environ is None else environ
    parts = urlsplit(url)
    set_here = {name.lower(): (name, value) for name, value in environ.items() if value}
    if "aws_proxy_url" in set_here:
        return set_here["aws_proxy_url"]
    found = set_here.get(f"{parts.scheme}_proxy") or set_here.get("all_proxy")
    if found is None:
        return None
    host = parts.hostname or ""
    spared = (one.strip().lstrip(".") for one in set_here.get(_SPARED.lower(), ("", ""))[1].split(","))
    return None if any(one == "*" or (one and f".{host}".endswith(f".{one}")) for one in spared) else found
