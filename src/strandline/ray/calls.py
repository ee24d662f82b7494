"""Calls of the ingress to replicas: plain data, which the request router also reads."""

from dataclasses import dataclass

from strandline.ids import RequestId


@dataclass(frozen=True, slots=True)
class Run:
    """Run the sequences of one prompt."""

    request_id: RequestId
    """Id of the first sequence."""
    prompt: bytes
    """Token ids, encoded."""
    salt: str
    submit: bytes
    """The sequences, as an encoded message ``Submit``."""


@dataclass(frozen=True, slots=True)
class End:
    """End sequences that run on a replica."""

    replica: str
    request_ids: tuple[RequestId, ...]
