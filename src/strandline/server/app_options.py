"""How an application is served: who may use it, and what it shows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from strandline.server.engines.tenants import Tenant
from strandline.server.http.cross_origin import CrossOrigin
from strandline.server.http.request_ids import HEADERS


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """Options of the application, other than those of the service."""

    api_keys: Mapping[str, str] = field(default_factory=dict)
    """As ``Gate`` takes them."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """As ``Quotas`` takes them."""
    allowed_hosts: Collection[str] = ("*",)
    """As ``HostCheck`` takes them."""
    max_body_bytes: int = 8 * 2**20
    cache_page: str = "counts"
    """What ``/cache`` shows: ``text``, ``counts``, or ``off`` for no page."""
    cross_origin: CrossOrigin | None = None
    """What web pages of other origins may do; None: nothing."""
    ping_interval_s: float = 0
    """As ``StreamPings`` takes it."""
    continues_traces: bool = False
    """Whether requests continue the traces that their headers name."""
    has_admin: bool = False
    """Whether there are endpoints that pause and change the engines."""
    names_flags: bool = False
    """Whether errors about endpoints that are not served name the flag of ``strandline serve`` that adds them."""
    num_ranks: int = 1
    """Ranks of each engine."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """The configuration, as ``/server_info`` shows it: without secrets."""
    id_headers: Collection[str] = HEADERS
    """As ``RequestIds`` takes them."""
