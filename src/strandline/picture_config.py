"""How a model's pictures are resized and normalised, as its directory says.

A library's defaults are those of other models, so nothing is assumed: a file has to say it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strandline.config_fields import Fields, read_vocab_size
from strandline.errors import ConfigError
from strandline.model_config import ModelConfig, read_json_object

PREPROCESSOR_CONFIG: Final = "preprocessor_config.json"
PROCESSOR_CONFIG: Final = "processor_config.json"
"""Has in ``image_processor`` what older models have in a file of its own."""

MAX_PATCH: Final = 256
MAX_MERGE: Final = 16
MAX_PIXELS: Final = 2**32
BICUBIC: Final = 3
"""Pillow's number for bicubic resampling."""
BYTE_SCALE_TOLERANCE: Final = 1e-9
NUM_CHANNELS: Final = 3


@dataclass(frozen=True, slots=True)
class PictureConfig:
    """What becomes a token of a picture, and which tokens surround it."""

    patch_size: int
    """Pixels of a patch's side."""
    merge_size: int
    """Patches of a token's side."""
    min_pixels: int
    max_pixels: int
    """Pixels of a resized picture, at most; more or fewer are not meant by the model."""
    mean: tuple[float, ...]
    """Mean of each channel, of values between 0 and 1."""
    std: tuple[float, ...]
    """Standard deviation of each channel."""
    image_token_id: int
    """The token that stands for a picture in chat templates."""
    start_token_id: int
    """The token before a picture."""
    end_token_id: int
    """The token after a picture."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens that only a chat template writes."""
        return [self.image_token_id, self.start_token_id, self.end_token_id]

    @property
    def token_side(self) -> int:
        """Pixels of a token's side; sides of resized pictures are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest picture."""
        return self.max_pixels // self.token_side**2


def read_picture_config(directory: Path, config: ModelConfig) -> PictureConfig | None:
    """Read how a model's pictures are prepared.

    Returns:
        None: the model has no vision tower that is supported, or its directory does not say how pictures are prepared.

    Raises:
        ConfigError: a setting is wrong, or not supported.
    """
    try:
        return _read(directory, config)
    except ConfigError as error:
        raise ConfigError(f"{error}; with --language-model-only the vision tower is not loaded") from error


def _read(directory: Path, config: ModelConfig) -> PictureConfig | None:
    found = None if config.vision is None else _read_file(directory)
    if config.vision is None or found is None:
        return None
    vision = config.vision
    patch_size = _read_shared(found, "patch_size", vision.size("patch_size", at_most=MAX_PATCH))
    merge_size = _read_shared(found, "merge_size", vision.size("spatial_merge_size", at_most=MAX_MERGE))
    _require_usual_steps(found)
    min_pixels = found.size("min_pixels", at_most=MAX_PIXELS)
    at_least = max(min_pixels, (patch_size * merge_size) ** 2)
    max_pixels = found.size("max_pixels", at_least=at_least, at_most=MAX_PIXELS)
    vocab_size = read_vocab_size(config.text)
    image, start, end = (
        vision.size(name, at_least=0, at_most=vocab_size - 1)
        for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id")
    )
    mean = _read_channels(found, "image_mean", at_least=0.0)
    std = _read_channels(found, "image_std", at_least=1e-3)
    return PictureConfig(patch_size, merge_size, min_pixels, max_pixels, mean, std, image, start, end)


def _read_file(directory: Path) -> Fields | None:
    file = directory / PREPROCESSOR_CONFIG
    if file.is_file():
        return _with_limits(read_json_object(file), f"{PREPROCESSOR_CONFIG}: ")
    file = directory / PROCESSOR_CONFIG
    part = read_json_object(file).get("image_processor") if file.is_file() else None
    if part is None:
        return None
    if not isinstance(part, dict):
        raise ConfigError(f"{file}: image_processor must be an object")
    return _with_limits(part, f"{PROCESSOR_CONFIG}: image_processor.")


def _with_limits(values: dict[str, Any], prefix: str) -> Fields:
    """Return fields whose limits of pixels have one name each: some files have them in ``size``."""
    size = values.get("size") or {}
    if not isinstance(size, dict):
        Fields(values, prefix).reject("size", "an object")
    named = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    spelled = {name: f"size.{edge}" for name, edge in named.items() if values.get(name) is None}
    limits = {name: size.get(named[name]) for name in spelled}
    return Fields({**values, **limits}, prefix, spelled)


def _read_shared(fields: Fields, name: str, size: int) -> int:
    """Return a size that has to be the vision tower's."""
    if fields.size(name) != size:
        fields.reject(name, f"the vision tower's, {size}")
    return size


def _require_usual_steps(fields: Fields) -> None:
    """Check that pictures are resized bicubically, scaled from bytes and normalised, where the file says."""
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag(name, default=True):
            fields.reject(name, "true")
    if fields.size("resample", at_least=0, default=BICUBIC) != BICUBIC:
        fields.reject("resample", f"{BICUBIC}, bicubic")
    scale = fields.number("rescale_factor", at_least=0, at_most=1, default=1 / 255)
    if abs(scale - 1 / 255) > BYTE_SCALE_TOLERANCE:
        fields.reject("rescale_factor", "1/255")


def _read_channels(fields: Fields, name: str, at_least: float) -> tuple[float, ...]:
    channels = fields.list_of(name, lambda entries, entry: entries.number(entry, at_least=at_least, at_most=1.0))
    if len(channels) != NUM_CHANNELS:
        fields.reject(name, f"a list of {NUM_CHANNELS} numbers")
    return channels
