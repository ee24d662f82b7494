"""Conversations about screenshots: every turn shows a new one, and contains the model's real answers to the others.

The pictures are tiles of random colours: no two are alike, and their files are small.
"""

import struct
import zlib
from base64 import b64encode
from functools import partial
from random import Random
from typing import Any, Final

import numpy as np

from strandline.bench.serving.maker import Maker
from strandline.bench.serving.session import Ask, Asks, Session
from strandline.bench.serving.turns import keeps_place, pauses, require_turns
from strandline.errors import ConfigError

TILE_PIXELS: Final = 40
PNG_START: Final = b"\x89PNG\r\n\x1a\n"
RGB_IN_BYTES: Final = bytes([8, 2, 0, 0, 0])
"""The end of a PNG's header: bits of a sample, kind of colours, and the usual compression, filter and order."""


def screenshot_conversations(maker: Maker) -> list[Session]:
    """Return conversations of ``--multi-turn-num-turns`` screenshots; enough for ``--num-prompts`` requests.

    Raises:
        ConfigError: the endpoint takes no messages, or a length is out of range.
    """
    options = maker.options
    if not maker.is_chat:
        raise ConfigError("screenshots are parts of messages: use --backend openai-chat")
    require_turns(options)
    rng = Random(f"screenshots {options.seed}")
    system = maker.vocabulary.decode(maker.vocabulary.draw(rng, options.multi_turn_system_len))
    num_conversations = -(-options.num_prompts // options.multi_turn_num_turns)
    return [
        Session(partial(_talk, maker, system, rng.getrandbits(64)), holds_its_place=keeps_place(maker))
        for _ in range(num_conversations)
    ]


def _talk(maker: Maker, system: str, seed: int) -> Asks:
    options, rng = maker.options, Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for _, think_s in zip(range(options.multi_turn_num_turns), pauses(maker, seed), strict=False):
        text = maker.vocabulary.decode(maker.vocabulary.draw(rng, options.multi_turn_user_len))
        url = f"data:image/png;base64,{b64encode(random_png(rng, *options.screenshot_size)).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        messages.append({"role": "user", "content": content})
        answer = yield Ask(list(messages), options.multi_turn_output_len, think_s=think_s)
        if answer.error:
            return
        messages.append({"role": "assistant", "content": answer.text})


def random_png(rng: Random, width: int, height: int) -> bytes:
    """Return a PNG file of tiles of random colours."""
    shape = (-(-height // TILE_PIXELS), -(-width // TILE_PIXELS), 3)
    tiles = np.frombuffer(rng.randbytes(int(np.prod(shape))), dtype=np.uint8).reshape(shape)
    pixels = tiles.repeat(TILE_PIXELS, axis=0)[:height].repeat(TILE_PIXELS, axis=1)[:, :width]
    # A byte before each row says how it is filtered: not at all.
    rows = np.concatenate((np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)), axis=1)
    header = struct.pack(">II", width, height) + RGB_IN_BYTES
    return PNG_START + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes())) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
