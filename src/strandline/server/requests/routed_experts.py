"""The experts that tokens were routed to, as a response has them: an array of NumPy's format, in base64.

Source: "numpy.lib.format", version 1.0.
"""

from base64 import b64encode
from struct import pack
from typing import Final

from strandline.specs import RoutingShape
from strandline.text.output_streams import RequestStream

MAGIC: Final = b"\x93NUMPY\x01\x00"
HEADER_BYTES: Final = 128
"""Bytes before the numbers: the format's version and the description of the array."""


def routed_experts(shape: RoutingShape | None, stream: RequestStream, index: int, first: int) -> str | None:
    """Return the experts of an output that has ended, and of its prompt.

    Args:
        shape: shape of a token's experts; None: the engine does not record them.
        first: tokens of the prompt that are left out.
    """
    if shape is None:
        return None
    experts = stream.outputs[index].routed_experts(shape.num_bytes)
    return _encoded(experts, shape, min(first, len(stream.prompt_ids)))


def _encoded(experts: bytes, shape: RoutingShape, first: int) -> str:
    """Return the experts of tokens, without those of the first tokens."""
    rows = experts[first * shape.num_bytes :]
    dtype = {1: "|u1", 2: "<u2"}[shape.item_bytes]
    dimensions = (len(rows) // shape.num_bytes, shape.num_layers, shape.top_k)
    described = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {dimensions}, }}"
    header = described.ljust(HEADER_BYTES - len(MAGIC) - 3).encode() + b"\n"
    return b64encode(MAGIC + pack("<H", len(header)) + header + rows).decode()
