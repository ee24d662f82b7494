"""How products of experts are tiled choice by choice, and up to how many tokens this way is taken."""

from typing import Final, NamedTuple

MAX_TOKENS_FEW: Final = 4
"""With more tokens, reading an expert's weights once per choice costs more than sorting the choices into a list."""


class Few(NamedTuple):
    """How the two products of a few tokens are tiled."""

    block_up_n: int
    block_up_k: int
    warps_up: int
    block_down_n: int
    warps_down: int
    blocks_down: int = 1
    """In bfloat16, tiles of outputs of a program of the second product, one after the other. It loads the next one
    ahead."""
