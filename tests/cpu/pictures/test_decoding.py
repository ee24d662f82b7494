"""Decoding of pictures, and of what only claims to be one."""

import io
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from strandline.errors import RequestError
from strandline.picture_config import PictureConfig
from strandline.pictures import decoding
from strandline.pictures.decoding import decode_picture
from strandline.records.pictures import Picture
from tests.cpu.pictures.files import encoded, noise, png_of_size

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of files that it then reads or refuses
CONFIG = PictureConfig(16, 2, 65536, 16777216, (0.5,) * 3, (0.5,) * 3, 7, 8, 9)


def decode(data: bytes, max_tokens: int = 4096) -> Picture:
    return decode_picture(data, CONFIG, max_tokens)


def array_of(picture: Picture) -> np.ndarray:
    return np.frombuffer(picture.pixels, dtype=np.uint8).reshape(picture.height, picture.width, 3)


def assert_plain(picture: Picture, colour: tuple[int, int, int], tolerance: int = 0) -> None:
    assert np.abs(array_of(picture).astype(int) - colour).max() <= tolerance


@pytest.mark.parametrize(("width", "height"), [(640, 480), (100, 20), (17, 300), (1280, 720), (256, 256)])
def test_pixels_are_those_of_the_published_processor(width: int, height: int) -> None:
    image = noise(width, height)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 65536, "longest_edge": 16777216}, patch_size=16, do_normalize=False, do_rescale=False
    )
    patches = processor(images=[image], return_tensors="np")
    picture = decode(encoded(image))
    rows, columns = picture.height // 32, picture.width // 32
    assert patches["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    values = patches["pixel_values"].reshape(rows, columns, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, 0]
    expected = values.transpose(0, 2, 5, 1, 3, 6, 4).reshape(picture.height, picture.width, 3)
    assert (array_of(picture) == expected).all()
    assert picture.original_size == (width, height)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {})])
def test_picture_is_named_by_its_pixels_whatever_its_file(kind: str, options: dict[str, bool]) -> None:
    image = noise(300, 200)
    assert decode(encoded(image, kind, **options)).digest == decode(encoded(image)).digest
    assert decode(encoded(noise(300, 200, seed=1))).digest != decode(encoded(image)).digest


def test_jpeg_and_gif_are_read() -> None:
    assert_plain(decode(encoded(Image.new("RGB", (64, 64), (10, 200, 30)), "JPEG")), (10, 200, 30), tolerance=3)
    assert_plain(decode(encoded(Image.new("RGB", (64, 64), (255, 0, 0)), "GIF")), (255, 0, 0))


def test_first_frame_of_an_animation_counts() -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert_plain(decode(data), (255, 0, 0), tolerance=1)


def test_transparent_pixels_are_white() -> None:
    palette = Image.new("P", (64, 64), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    half = Image.new("RGBA", (64, 64), (0, 0, 0, 128))
    cases = [
        (encoded(Image.new("RGBA", (64, 64), (255, 0, 0, 0))), (255, 255, 255)),
        (encoded(Image.new("LA", (64, 64), (0, 0))), (255, 255, 255)),
        (encoded(palette, transparency=1), (255, 255, 255)),
        (encoded(palette), (255, 0, 0)),
        (encoded(Image.new("RGB", (64, 64), (9, 9, 9)), transparency=(9, 9, 9)), (255, 255, 255)),
        (encoded(half), (127, 127, 127)),
        (encoded(Image.fromarray(np.full((64, 64), 0x1010, dtype=np.uint16)), transparency=0x1010), (255, 255, 255)),
    ]
    for data, colour in cases:
        assert_plain(decode(data), colour)


def test_other_modes_become_colours() -> None:
    grey = np.full((64, 64), 0x8000, dtype=np.uint16)
    assert_plain(decode(encoded(Image.fromarray(grey))), (128, 128, 128))
    assert_plain(decode(encoded(Image.new("L", (64, 64), 77))), (77, 77, 77))
    assert_plain(decode(encoded(Image.new("1", (64, 64), 1))), (255, 255, 255))
    assert_plain(decode(encoded(Image.new("CMYK", (64, 64), (0, 255, 255, 0)), "JPEG")), (255, 0, 0), tolerance=3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_picture_is_turned_as_its_exif_says(orientation: int) -> None:
    image = Image.new("RGB", (64, 96), "black")
    image.paste((255, 255, 255), (0, 0, 64, 32))
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = decode(encoded(image, exif=exif))
    assert turned.original_size == ((64, 96) if orientation < 5 else (96, 64))
    bright = {1: "top", 2: "top", 3: "bottom", 4: "bottom", 5: "left", 6: "right", 7: "right", 8: "left"}[orientation]
    pixels = array_of(turned)[..., 0]
    quarter = {"top": pixels[:16], "bottom": pixels[-16:], "left": pixels[:, :16], "right": pixels[:, -16:]}
    assert {name for name, part in quarter.items() if part.mean() > 250} == {bright}


def test_exif_that_cannot_be_read_turns_nothing() -> None:
    data = encoded(noise(64, 64), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode(data).original_size == (64, 64)


def test_large_pictures_are_scaled_down_to_the_limit() -> None:
    picture = decode(encoded(Image.new("RGB", (3840, 2160))), max_tokens=256)
    assert picture.height * picture.width // 1024 <= 256
    assert picture.original_size == (3840, 2160)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "not a picture of a known format: PNG"),
        (b"GIF89a", "cannot be decoded|not a picture"),
        (b"II*\0" + bytes(100), "not a picture of a known format"),
        (png_of_size(60_000, 60_000), "at most 67,108,864 pixels"),
        (png_of_size(9000, 9000), "at most 67,108,864 pixels, got 9,000 × 9,000"),
        (png_of_size(500, 500), "cannot be decoded"),
        (png_of_size(0, 10), "cannot be decoded|must have pixels|not a picture"),
        (png_of_size(201, 1, bytes(604)), "at most 200 times the shorter one, got 201 × 1"),
        (encoded(noise(64, 64))[:300], "cannot be decoded"),
        (encoded(noise(64, 64), "JPEG")[:300], "cannot be decoded"),
        (encoded(noise(64, 64), "WEBP")[:300], "cannot be decoded|not a picture"),
        (b"", "not a picture"),
    ],
)
def test_hostile_files_are_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        decode(data)


@given(data=st.data(), kind=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP"]))
def test_broken_files_are_decoded_or_refused(data: st.DataObject, kind: str) -> None:
    file = bytearray(encoded(noise(40, 30), kind))
    for position, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(file) - 1), st.integers(0, 255)), min_size=1, max_size=8)
    ):
        file[position] = value
    with suppress(RequestError):
        picture = decode(bytes(file[: data.draw(st.integers(1, len(file)))]))
        assert len(picture.pixels) == 3 * picture.height * picture.width


def test_jpeg_with_very_many_scans_is_refused() -> None:
    data = encoded(noise(64, 64), "JPEG", progressive=True)
    assert decode(data).original_size == (64, 64)
    start = data.rindex(b"\xff\xda")
    with pytest.raises(RequestError, match="at most 100 scans"):
        decode(data[:start] + data[start:-2] * 100 + data[-2:])


def test_scans_of_a_jpeg_with_further_pictures_count() -> None:
    """Pillow calls such a file MPO."""
    data = encoded(noise(64, 64), "MPO", save_all=True, append_images=[noise(64, 64, seed=1)])
    assert decode(data).original_size == (64, 64)
    with pytest.raises(RequestError, match="at most 100 scans"):
        decode(data + b"\xff\xda" * 200)


@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"optimize": True, "progressive": True}])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_jpeg_that_says_it_is_larger_is_refused(mode: str, options: dict[str, bool]) -> None:
    data = encoded(Image.new(mode, (1024, 1024)), "JPEG", **options)
    assert decode(data).original_size == (1024, 1024)
    size = data.index((1024).to_bytes(2, "big") * 2)
    with pytest.raises(RequestError, match="cannot have 8,000 × 8,000 pixels"):
        decode(data[:size] + (8000).to_bytes(2, "big") * 2 + data[size + 4 :])


def test_large_jpeg_may_have_fewer_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_SCANNED_PIXELS", 64 * 64 * 5)
    data = encoded(noise(64, 64), "JPEG", progressive=True)
    with pytest.raises(RequestError, match="of this size may have at most 5 scans"):
        decode(data)


def test_file_of_very_many_parts_is_refused() -> None:
    file = encoded(noise(8, 8))
    body = file.index(b"IDAT") - 4
    text = b"\0\0\0\x03tEXtk\0v" + zlib.crc32(b"tEXtk\0v").to_bytes(4, "big")
    assert decode(file[:body] + text * 100 + file[body:]).original_size == (8, 8)
    with pytest.raises(RequestError, match="too many parts"):
        decode(file[:body] + text * 100_000 + file[body:])


def test_no_file_on_disk_is_read_by_name() -> None:
    eps = io.BytesIO(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) run\n")
    with pytest.raises(RequestError, match="not a picture of a known format"):
        decode(eps.getvalue())
