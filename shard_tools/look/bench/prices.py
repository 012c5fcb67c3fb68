"""Say what an epoch costs: requests, bytes, and money by a table of prices."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shard_tools.running.report import Report
from streaming.errors import ConfigError
from streaming.storage import ReadBuffer

BUILT_IN: Mapping[str, Any] = {
    "date": "2026-11",
    "currency": "USD",
    "s3": {"per_1000_requests": 0.0004, "per_gb_same_region": 0.0, "per_gb_internet": 0.09},
    "gs": {"per_1000_requests": 0.0004, "per_gb_same_region": 0.0, "per_gb_internet": 0.12},
    "az": {"per_1000_requests": 0.0005, "per_gb_same_region": 0.0, "per_gb_internet": 0.087},
}
"""List prices of standard storage in the clouds' first regions; those of other regions and contracts differ."""
_NAMES = ("per_1000_requests", "per_gb_same_region", "per_gb_internet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(Report):
    """What one epoch takes when every byte is read from the store once.

    Attributes:
        requests: Ranged reads: one for each chunk.
        num_bytes: Their bytes.
        prices: Which prices were used, and of when.
        currency: Of the amounts.
        for_requests: Money for the requests; None: no price is known for this store.
        same_region: Money for the bytes in the store's region.
        internet: Money for them if they leave the cloud.
    """

    requests: int
    num_bytes: int
    prices: str
    currency: str
    for_requests: float | None = None
    same_region: float | None = None
    internet: float | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form, with amounts that are not rounded."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def load_prices(data: ReadBuffer, name: str) -> dict[str, Any]:
    """Return the table of prices in a TOML or (``.json``) JSON file.

    Raises:
        ConfigError: It is not such a file, or holds something that is no price.
    """
    try:
        text = bytes(data).decode()
        table = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
        if not isinstance(table, dict):
            raise TypeError(f"expected a table, got {type(table).__name__}")  # noqa: TRY301
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"--prices {name}: neither TOML nor JSON ({error})") from error
    for scheme, prices in table.items():
        if scheme in {"date", "currency"}:
            continue
        for key, value in prices.items() if isinstance(prices, dict) else [("", prices)]:
            if key not in _NAMES or isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ConfigError(
                    f"--prices {name}: {scheme}.{key}: expected one of {', '.join(_NAMES)} with a number, "
                    f"got {value!r}; see docs/tools/bench.md"
                )
    return table


def cost_of(scheme: str, requests: int, num_bytes: int, table: Mapping[str, Any] | None) -> Cost:
    """Return what so many requests and bytes cost in stores of this scheme, by a table or the built-in one."""
    said = (
        "of --prices" if table is not None else "list prices of standard storage; those of regions and contracts differ"
    )
    table = BUILT_IN if table is None else table
    date, currency = str(table.get("date", "no date")), str(table.get("currency", "USD"))
    prices = table.get(scheme)
    known = Cost(requests=requests, num_bytes=num_bytes, prices=f"{said} ({date})", currency=currency)
    if prices is None:
        return known
    per_request, same_region, internet = (float(prices.get(name, 0.0)) for name in _NAMES)
    return Cost(
        requests=requests,
        num_bytes=num_bytes,
        prices=known.prices,
        currency=currency,
        for_requests=requests / 1000 * per_request,
        same_region=num_bytes / 1e9 * same_region,
        internet=num_bytes / 1e9 * internet,
    )
