"""What the ingress asks replicas for: plain data, which the request router reads too."""

from dataclasses import dataclass

from strandline.ids import RequestId


@dataclass(frozen=True, slots=True)
class Run:
    """Run the sequences of one prompt."""

    request_id: RequestId
    """The first sequence's."""
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
