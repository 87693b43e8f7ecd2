"""The keys of ``kv_connector_extra_config``: typed, with unknown ones refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


class SettingsError(ValueError):
    """A key or value in ``kv_connector_extra_config`` that cannot be used."""


@dataclass(frozen=True)
class Settings:
    """What a user may set. `None` leaves it to kvxfer's own configuration (``config`` and ``KVXFER_*``)."""

    #: ``address:port`` or a list of them. Port 0 takes a free port; with another port, worker ``i`` takes ``port + i``.
    listen: str | list[str] | None = None
    #: Transports by name, in order of preference.
    transports: list[str] | None = None
    #: kvxfer's configuration: a table, or TOML text.
    config: dict[str, Any] | str | None = None
    #: Label of the endpoints; the worker's number is appended. Default: the engine id.
    name: str | None = None
    #: Release parts layer by layer while a step runs, instead of when it ends.
    layerwise: bool = False
    #: Compute a checksum when sending and check it before the arrival counts.
    checksum: bool = False
    #: What a preemption does to a hand-off: ``restart`` takes the blocks back and goes on with the recomputed ones,
    #: ``retract`` takes them back and ends it.
    preemption: str = "restart"
    #: Longest wait, in milliseconds, for reads of preempted blocks.
    preemption_wait_ms: int = 100
    #: Seconds that a computed prompt waits to be claimed, by each reader and rank that is to come. Time before the last
    #: token is computed does not count.
    unclaimed_seconds: int = 120
    #: Seconds until a computed prompt is given up although it is claimed: decode may have no blocks for it, and wait for
    #: another prompt that these blocks are in the way of.
    unserved_seconds: int = 300
    #: Longest life of an offer, in seconds, from its first chunk on.
    hold_seconds: int = 3600
    #: ``auto``: packed where vLLM's kernels permute inside a block (CPU), described by geometry elsewhere.
    #: ``packed``: whole blocks only. ``declared``: the CPU order is declared, and its bytes are checked at the start.
    block_order: str = "auto"
    #: A file that gets this server's addresses (JSON) once it can be claimed from. ``{engine_id}`` is replaced.
    address_file: str | None = None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        """Reads the table.

        Raises `SettingsError` for unknown keys, wrong types and impossible values, naming the key and what it takes.
        """
        known = {field.name for field in fields(cls)}
        for key in extra:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise SettingsError(
                    f"kv_connector_extra_config: unknown key {key!r}{hint} Known: {', '.join(sorted(known))}"
                )
        values = {key: _CHECKS[key](key, value) for key, value in extra.items() if value is not None}
        return cls(**values)

    def listen_of(self, worker: int) -> list[str] | None:
        """Where this worker listens: fixed ports are spread, since each worker needs its own."""
        if self.listen is None:
            return None
        listen = [self.listen] if isinstance(self.listen, str) else self.listen
        return [_shifted(address, worker) for address in listen]


def _shifted(address: str, worker: int) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise SettingsError(f"kv_connector_extra_config: listen: {address!r} is not address:port")
    if int(port) == 0:
        return address
    return f"{host}:{int(port) + worker}"


def _refuse(key: str, value: Any, wanted: str) -> SettingsError:
    return SettingsError(f"kv_connector_extra_config: {key}: {value!r} is not {wanted}")


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _refuse(key, value, "a text")
    return value


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(key, value, "true or false")
    return value


def _listen(key: str, value: Any) -> str | list[str]:
    addresses = [value] if isinstance(value, str) else value
    if not isinstance(addresses, list) or not 1 <= len(addresses) <= 2:
        raise _refuse(key, value, "address:port or a list of one or two of them")
    for address in addresses:
        _shifted(_text(key, address), 0)
    return value


def _names(key: str, value: Any) -> list[str]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise _refuse(key, value, "a list of names")
    return value


def _table(key: str, value: Any) -> dict[str, Any] | str:
    if not isinstance(value, (dict, str)):
        raise _refuse(key, value, "a table, or TOML text")
    return value


def _one_of(*choices: str) -> Any:
    def check(key: str, value: Any) -> str:
        if value not in choices:
            raise _refuse(key, value, "one of " + ", ".join(choices))
        return str(value)

    return check


def _whole(low: int, high: int) -> Any:
    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _refuse(key, value, f"a whole number from {low} to {high}")
        return value

    return check


_CHECKS = {
    "listen": _listen,
    "transports": _names,
    "config": _table,
    "name": _text,
    "layerwise": _flag,
    "checksum": _flag,
    "preemption": _one_of("restart", "retract"),
    "preemption_wait_ms": _whole(1, 60_000),
    "unclaimed_seconds": _whole(1, 604_800),
    "unserved_seconds": _whole(1, 604_800),
    "hold_seconds": _whole(1, 604_800),
    "block_order": _one_of("auto", "packed", "declared"),
    "address_file": _text,
}
