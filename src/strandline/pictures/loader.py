"""Loads the pictures of requests, in threads, and keeps those of the last requests: a conversation sends them again."""

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Final

from strandline.config import EngineConfig
from strandline.errors import ConfigError, RequestError
from strandline.model_config import read_model_config
from strandline.picture_config import PREPROCESSOR_CONFIG, PictureConfig, read_picture_config
from strandline.pictures.decoding import LOW_DETAIL_TOKENS, decode_picture, is_pillow_installed, scale_picture
from strandline.pictures.references import MediaAccess
from strandline.records.pictures import Picture, PictureReference

LOGGER: Final = logging.getLogger("strandline.pictures")
MAX_DECODERS: Final = 4
"""Threads that decode. Each may hold a decoded picture."""
MAX_FETCHERS: Final = 16
"""Threads that fetch, so that slow hosts do not keep others' pictures from being decoded."""
KEPT_BYTES: Final = 256 * 2**20
INSTALL: Final = "pictures need Pillow: pip install 'strandline[images]'"


class PictureLoader:
    """Loads pictures. Any thread may call it.

    Args:
        config: how the model reads them.
        max_tokens: most tokens of a picture.
        max_pictures: most pictures of a prompt; None: any number.
    """

    def __init__(
        self,
        config: PictureConfig,
        access: MediaAccess | None = None,
        *,
        max_tokens: int,
        max_pictures: int | None = None,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.config = config
        self._access = access or MediaAccess()
        self._max_tokens = max_tokens
        self._max_pictures = max_pictures
        self._decoders = ThreadPoolExecutor(min(MAX_DECODERS, os.cpu_count() or 1), "pictures")
        self._fetchers = ThreadPoolExecutor(MAX_FETCHERS, "fetched pictures")
        self._lock = Lock()
        self._kept = OrderedDict[tuple[bytes, int], Picture]()
        """By digest of the file and most tokens; the last used last."""
        self._num_kept_bytes, self._max_kept_bytes = 0, kept_bytes

    def check_number(self, number: int) -> None:
        """Raise a RequestError if a prompt has too many pictures, or none can be decoded here."""
        if self._max_pictures is not None and number > self._max_pictures:
            raise RequestError(
                f"a prompt may have at most {self._max_pictures} pictures, got {number}; raise --limit-mm-per-prompt"
            )
        if number and not is_pillow_installed():
            raise RequestError(INSTALL)

    def submit(self, reference: PictureReference | Any) -> "Future[Picture]":
        """Begin to load a picture, or to scale one of Pillow; the errors of its future are RequestErrors."""
        if not isinstance(reference, PictureReference):
            return self._decoders.submit(self._scale, reference)
        if reference.url[:4].lower() == "http":
            return self._fetchers.submit(self._fetch, reference)
        return self._decoders.submit(self._read, reference)

    def load(self, references: Sequence[PictureReference | Any]) -> list[Picture]:
        """Load the pictures of a prompt.

        Raises:
            RequestError: as ``check_number``, or one cannot be loaded; the message has its number.
        """
        self.check_number(len(references))
        return [loaded(future, number) for number, future in enumerate(map(self.submit, references), 1)]

    def _fetch(self, reference: PictureReference) -> Picture:
        data = self._access.read(reference.url)
        return self._decoders.submit(self._decode, data, reference).result()

    def _read(self, reference: PictureReference) -> Picture:
        return self._decode(self._access.read(reference.url), reference)

    def _decode(self, data: bytes, reference: PictureReference) -> Picture:
        most = min(self._max_tokens, LOW_DETAIL_TOKENS) if reference.detail == "low" else self._max_tokens
        key = (hashlib.sha256(data).digest(), most)
        with self._lock:
            picture = self._kept.get(key)
            if picture is not None:
                self._kept.move_to_end(key)
                return picture
        picture = decode_picture(data, self.config, most)
        self._keep(key, picture)
        return picture

    def _scale(self, image: Any) -> Picture:
        from PIL import Image

        if not isinstance(image, Image.Image):
            raise RequestError(f"a picture must be an Image of Pillow, got {type(image).__name__}")
        return scale_picture(image, self.config, self._max_tokens)

    def _keep(self, key: tuple[bytes, int], picture: Picture) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = picture
                self._num_kept_bytes += len(picture.pixels)
            while self._num_kept_bytes > self._max_kept_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._num_kept_bytes -= len(dropped.pixels)


class RefusedPictures:
    """Refuses the pictures of requests to a model whose files do not say how to prepare them."""

    config: None = None
    reason: Final = f"pictures are refused: the model's directory has no {PREPROCESSOR_CONFIG}"

    def check_number(self, number: int) -> None:
        """Do nothing: each picture is refused by ``submit``."""

    def submit(self, reference: PictureReference | Any) -> "Future[Picture]":
        """Raise a RequestError."""
        raise RequestError(self.reason)

    def load(self, references: Sequence[PictureReference | Any]) -> list[Picture]:
        """Raise a RequestError if there are pictures."""
        return [self.submit(reference).result() for reference in references]


def new_loader(config: EngineConfig, directory: Path) -> PictureLoader | RefusedPictures | None:
    """Return what loads the pictures of requests; None: the model reads none, or is not to.

    Args:
        directory: the model's.

    Raises:
        ConfigError: its files are wrong.
    """
    model = read_model_config(directory)
    if config.language_model_only or model.vision is None:
        return None
    pictures = read_picture_config(directory, model)
    if pictures is None:
        return RefusedPictures()
    if not is_pillow_installed():
        LOGGER.warning("pictures are refused: %s", INSTALL)
    allowed = config.allowed_local_media_path
    if allowed is not None and not Path(allowed).is_dir():
        raise ConfigError(f"--allowed-local-media-path must be a directory, got {allowed!r}")
    access = MediaAccess(config.allowed_media_domains, allowed)
    max_tokens = min(config.max_image_tokens, pictures.max_tokens)
    return PictureLoader(pictures, access, max_tokens=max_tokens, max_pictures=config.max_images)


def loaded(future: "Future[Picture]", number: int) -> Picture:
    """Return the picture of a future; name it in the error if there is one."""
    try:
        return future.result()
    except RequestError as error:
        raise RequestError(f"picture {number} of the prompt: {error}", param=error.param) from error
