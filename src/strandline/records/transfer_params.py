"""``kv_transfer_params``: what a proxy passes between the engine that computes a prompt and the one that continues it.

Names are vLLM's. A proxy asks the first engine with ``do_remote_decode``, and hands what that returns to the second one
as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strandline.errors import RequestError

NAME = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What a request hands over, or where its prompt's prefix can be fetched."""

    is_remote_decode: bool = False
    """Another engine will continue: keep what was computed."""
    is_remote_prefill: bool = False
    """Another engine has a prefix of the prompt: fetch it."""
    host: str = ""
    port: int = 0
    engine_id: str = ""
    """The identity of the other engine; empty: any."""
    lease_id: str = ""
    """Under which it keeps the prefix; empty: whatever it has cached."""
    num_tokens: int = 0
    """How many tokens it keeps; 0: unknown."""

    def as_json(self, *, expires_at: float) -> dict[str, Any]:
        """Return what the other engine's request is to carry.

        Args:
            expires_at: seconds since the epoch.
        """
        return {
            "do_remote_prefill": self.is_remote_prefill,
            "do_remote_decode": self.is_remote_decode,
            "remote_engine_id": self.engine_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_request_id": self.lease_id,
            "remote_num_tokens": self.num_tokens,
            "remote_blocks_expiry_time": expires_at,
            "remote_block_ids": None,
            "tp_size": 1,
            "transfer_mode": "pull",
        }


def read_transfer_params(value: Mapping[str, Any] | None) -> TransferParams | None:
    """Read a request's field; None: it asks for nothing. Unknown fields are ignored: they may be another engine's.

    Raises:
        RequestError: a field has another type or is out of range, or there is no address to fetch from.
    """
    if value is None:
        return None
    is_decode, is_prefill = (_field(value, name, bool, False) for name in ("do_remote_decode", "do_remote_prefill"))
    if is_decode and is_prefill:
        raise RequestError(f"{NAME}: do_remote_decode and do_remote_prefill exclude each other")
    if is_decode:
        return TransferParams(is_remote_decode=True)
    if not is_prefill:
        return None
    params = TransferParams(
        is_remote_prefill=True,
        host=_field(value, "remote_host", str, ""),
        port=_field(value, "remote_port", int, 0),
        engine_id=_field(value, "remote_engine_id", str, ""),
        lease_id=_field(value, "remote_request_id", str, ""),
        num_tokens=_field(value, "remote_num_tokens", int, 0),
    )
    if params.num_tokens < 0:
        raise RequestError(f"{NAME}: remote_num_tokens must be at least 0, got {params.num_tokens}")
    if not params.host or not 0 < params.port < 2**16:
        raise RequestError(
            f"{NAME}: do_remote_prefill needs remote_host and remote_port, got {params.host!r:.100} and {params.port}"
        )
    return params


def _field(value: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    found = value.get(name)
    if found is None:
        return default
    if type(found) is not kind:
        raise RequestError(f"{NAME}: {name} must be of type {kind.__name__}, got {found!r:.100}")
    return found
