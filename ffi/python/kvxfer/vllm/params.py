"""Keys and addresses: what clients and routers carry in ``kv_transfer_params``.

Prefill's request::

    {"do_remote_decode": true}                               # the key is made here, and comes back in the response
    {"do_remote_decode": true, "transfer_id": "r-17"}        # the router's key: decode may be asked at the same time
    {"describe": true}                                       # no hand-off: only this server's addresses come back

Prefill's response, and decode's request (a router hands it on as it is, or writes it itself)::

    {"do_remote_prefill": true, "transfer_id": "r-17", "remote_addresses": ["kvx1:...", "kvx1:..."]}

The key is what travels here: vLLM appends random characters to request ids on each side. Addresses carry the
incarnation of the endpoint: those of a server that has restarted are refused (``StalePeer``), they never lead to
another life of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Longest key, in bytes of UTF-8.
KEY_BYTES_MAX = 256
#: Most source ranks that one claim names.
ADDRESSES_MAX = 1024
#: Most decode requests that one prefill request may serve.
READERS_MAX = 65_535


class ParamsError(ValueError):
    """``kv_transfer_params`` that cannot be used."""


@dataclass(frozen=True)
class PrefillParams:
    """What a prefill request asks for."""

    #: Under which its KV is offered.
    key: str
    #: Claim sets served before the blocks are released (for ``n > 1`` on decode).
    readers: int


@dataclass(frozen=True)
class DecodeParams:
    """Where a decode request's KV comes from."""

    #: Under which it is claimed.
    key: str
    #: The endpoint addresses of all prefill ranks.
    addresses: tuple[str, ...]


def wants_description(params: Mapping[str, Any] | None) -> bool:
    """Whether the request asks for nothing but the server's addresses."""
    return params is not None and bool(params.get("describe"))


def prefill_params(params: Mapping[str, Any] | None, request_id: str) -> PrefillParams | None:
    """What to offer for a request; `None` if nothing.

    Raises `ParamsError` for a `transfer_id` or `readers` that cannot be used.
    """
    if not params or not params.get("do_remote_decode"):
        return None
    given = params.get("transfer_id")
    key = _key(given) if given is not None else _own_key(request_id)
    readers = params.get("readers", 1)
    if isinstance(readers, bool) or not isinstance(readers, int) or not 1 <= readers <= READERS_MAX:
        raise ParamsError(f"readers: {readers!r} is not a whole number from 1 to {READERS_MAX}")
    return PrefillParams(key, readers)


def decode_params(params: Mapping[str, Any] | None) -> DecodeParams | None:
    """Where to claim a request's KV; `None` if it is computed here.

    Raises `ParamsError` if something is missing or cannot be used.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    if params.get("transfer_id") is None:
        raise ParamsError(
            "transfer_id is missing: hand on prefill's kv_transfer_params, or give both requests the same transfer_id"
        )
    addresses = params.get("remote_addresses")
    if isinstance(addresses, str):
        addresses = [addresses]
    if not isinstance(addresses, (list, tuple)) or not addresses:
        raise ParamsError(
            "remote_addresses is missing: a list of the prefill server's endpoint addresses, from any of its "
            'responses, from its address_file, or from a request with {"describe": true}'
        )
    if len(addresses) > ADDRESSES_MAX or not all(isinstance(address, str) and address for address in addresses):
        raise ParamsError(f"remote_addresses: not a list of 1 to {ADDRESSES_MAX} texts")
    return DecodeParams(_key(params["transfer_id"]), tuple(addresses))


def answer(key: str, addresses: Sequence[str], engine_id: str, tokens: int) -> dict[str, Any]:
    """Prefill's response: decode's request, ready to be handed on."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": key,
        "remote_addresses": list(addresses),
        "remote_engine_id": engine_id,
        "remote_tokens": tokens,
    }


def description(addresses: Sequence[str], engine_id: str) -> dict[str, Any]:
    """The response to a request that asked for the addresses."""
    return {"remote_addresses": list(addresses), "remote_engine_id": engine_id}


def claim_set(engine_id: str, request_id: str) -> int:
    """The number under which all ranks of a reader claim: the same on each, another for each request."""
    digest = hashlib.blake2b(f"{engine_id}\0{request_id}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big")


def _key(given: Any) -> str:
    if not isinstance(given, str) or not 1 <= len(given.encode("utf-8", "surrogatepass")) <= KEY_BYTES_MAX:
        raise ParamsError(f"transfer_id: not a text of 1 to {KEY_BYTES_MAX} bytes")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise ParamsError("transfer_id: not valid Unicode") from error
    return given


def _own_key(request_id: str) -> str:
    # A client may choose a request id of any length.
    if len(request_id.encode("utf-8", "replace")) <= KEY_BYTES_MAX:
        return _key(request_id)
    return "sha256-" + hashlib.sha256(request_id.encode("utf-8", "replace")).hexdigest()
