"""Check the ``storage_options`` that users give: names, aliases, values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from streaming.common.arguments import did_you_mean, is_number
from streaming.errors import ConfigError
from streaming.storage.base.mirrors import Mirror, parse_mirrors
from streaming.storage.base.urls import secrets_of

GROWTH = 4
"""Factor between the bounds of consecutive delays: an isolated fault costs almost nothing, and a store that keeps
failing gets as few requests as with a longer first delay that doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Time-outs and retries of one storage.

    Attributes:
        connect_timeout_s: Time limit for establishing a connection.
        read_timeout_s: Time without a byte after which an answer counts as stalled.
        deadline_s: Time limit of one call over all its attempts.
        max_retries: Consecutive attempts without a new byte before the call fails. Wrong bytes are requested again as
            many times, but at most ten times.
        first_backoff_s: Upper bound of the first delay; quadrupled with each attempt. 20 ms is about a round trip to a
            store in the same region; with 100 ms, an epoch with 1 % of failures waits for them (``bench_faults.py``).
        max_backoff_s: Maximum of these bounds.
        retry_share: Retries without progress, as a share of the calls; a few unused ones are saved up. Further retries
            are limited to two per second, so that a store that fails every request is not overloaded.
        unreachable_s: Maximum time of retries without any connection: long enough for a restart behind a load balancer,
            short enough that a wrong endpoint is reported soon.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    deadline_s: float = 300.0
    max_retries: int = 10
    first_backoff_s: float = 0.02
    max_backoff_s: float = 10.0
    unreachable_s: float = 3.0
    retry_share: float = 0.2

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            valid = is_number(value) and value >= 0
            if not valid or (value == 0 and name.endswith(("timeout_s", "deadline_s"))):
                raise ConfigError(f"storage option {name}: expected a positive number, got {value!r}")


_ALIASES = {
    "region_name": "region",
    "endpoint": "endpoint_url",
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
    "sas": "sas_token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """Options for access to the stores, named as in fsspec if fsspec has the option.

    Attributes:
        endpoint_url: Server to use instead of the cloud's own.
        region: Region of the bucket (s3).
        key: Access key id (s3).
        secret: Secret access key (s3).
        token: Session token (s3); access token or path of a key file (gs); access token (hf and the like).
        anon: Send no credentials at all.
        profile: Name of a profile in the AWS configuration (needs boto3).
        requester_pays: Whether the requester pays for the traffic (s3).
        path_style: Whether the bucket is part of the path; default: with an endpoint_url only.
        account_name: Storage account (az).
        account_key: Key of the account (az).
        sas_token: Shared access signature (az).
        connection_string: Azure's connection string (az, fsspec client only).
        ca_file: PEM file of certificate authorities to trust in addition to the system's; default: the environment's
            AWS_CA_BUNDLE.
        client: "fsspec" to use fsspec where obstore is the default; "obstore" to use only obstore, even for large
            ranges over plain HTTP, which are otherwise received directly in the loader's memory.
        fsspec: Additional keyword arguments for the fsspec file system.
        mirrors: Prefix → complete copies of the objects below it: one or a list, each a URL or a dict of ``url`` and
            the options that differ from these. Used when the primary fails permanently.
        retry: Time-outs and retries; set by separate options, see :class:`RetryPolicy`.
        read_only: Refuse every write and every deletion, before anything is sent.
        hedge: Whether a read that stalls gets a second request for the missing bytes; not for files.
    """

    endpoint_url: str | None = field(default=None, repr=False)
    region: str | None = None
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    anon: bool = False
    profile: str | None = None
    requester_pays: bool = False
    path_style: bool | None = None
    account_name: str | None = None
    account_key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)
    connection_string: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    client: str | None = None
    fsspec: Mapping[str, object] = field(default_factory=dict, repr=False)
    mirrors: Mapping[str, tuple[Mirror, ...]] = field(default_factory=dict, repr=False)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    hedge: bool = True
    read_only: bool = False

    def __post_init__(self) -> None:
        if self.client not in {None, "fsspec", "obstore"}:
            raise ConfigError(f'storage option client: "fsspec", "obstore" or None, got {self.client!r}')
        if (self.key is None) != (self.secret is None):
            given, missing = ("key", "secret") if self.secret is None else ("secret", "key")
            raise ConfigError(f"storage option {given} is given without {missing}; give both or neither")
        if self.anon and self.key is not None:
            raise ConfigError("storage options anon=True and key cannot be combined; give one of them")

    @property
    def secrets(self) -> set[str]:
        """All secrets, in the form in which they were given."""
        given = (self.key, self.secret, self.token, self.account_key, self.connection_string)
        found = {one for one in given if one} | secrets_of(f"?{(self.sas_token or '').lstrip('?')}")
        return found | secrets_of(self.endpoint_url or "")


_BOOLEANS = {"anon", "requester_pays", "path_style", "hedge", "read_only"}
_TIMES = tuple(item.name for item in fields(RetryPolicy))
_DEFAULTS = StorageOptions()
_NAMES = tuple(item.name for item in fields(StorageOptions) if item.name != "retry")
STORAGE_OPTIONS = frozenset((*_NAMES, *_TIMES))
"""Names of all storage options."""


def storage_option_name(given: str) -> str:
    """Return the name of an option, given an alias such as ``"endpoint"``."""
    return _ALIASES.get(given, given)


def parse_options(options: Mapping[str, object] | None) -> StorageOptions:
    """Return ``options`` checked and typed.

    Raises:
        ConfigError: An unknown name (the message lists the known ones) or a value of the wrong type. The message never
            repeats a value that may be secret.
    """
    values: dict[str, object] = {}
    times: dict[str, object] = {}
    for given, value in (options or {}).items():
        name = storage_option_name(given)
        if name in values or name in times:
            raise ConfigError(f"storage option {name} is given twice, also as {given}; give it once")
        if name in _TIMES:
            times[name] = value
        elif name in _NAMES:
            values[name] = parse_mirrors(value or {}) if name == "mirrors" else _checked(name, value)
        else:
            raise ConfigError(_unknown(given))
    retry = RetryPolicy(**times)  # type: ignore[arg-type] # it checks
    return StorageOptions(**values, retry=retry)  # type: ignore[arg-type] # checked above


def _checked(name: str, value: object) -> object:
    """Return ``value`` if its type fits; it is never shown, because it may be secret."""
    expected: type = bool if name in _BOOLEANS else Mapping if name == "fsspec" else str
    if value is None and name != "hedge":
        return getattr(_DEFAULTS, name)
    if not isinstance(value, expected):
        raise ConfigError(f"storage option {name}: expected {expected.__name__}, got {type(value).__name__}")
    return value


def _unknown(name: str) -> str:
    known = sorted((*_NAMES, *_TIMES))
    return (
        f"unknown storage option {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}. "
        'Options of an fsspec file system go into the option "fsspec", a dict'
    )
