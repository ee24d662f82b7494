"""Loading of the pictures of a prompt."""

import base64
import io
from pathlib import Path
from threading import Event

import pytest
from PIL import Image

from strandline.config import EngineConfig
from strandline.errors import ConfigError, RequestError
from strandline.pictures import loader as loader_module
from strandline.pictures.loader import PictureLoader, new_loader
from strandline.pictures.references import MediaAccess
from strandline.records.pictures import PictureReference
from tests.cpu.engine.vision_engine import save_vision_model
from tests.cpu.pictures.files import encoded, noise, png_of_size
from tests.cpu.pictures.test_decoding import CONFIG


def reference(image: Image.Image, detail: str = "auto") -> PictureReference:
    return PictureReference("data:;base64," + base64.b64encode(encoded(image)).decode(), detail)


def test_pictures_are_loaded_in_their_order() -> None:
    images = [noise(32 * size, 400, seed=size) for size in range(8, 16)]
    pictures = PictureLoader(CONFIG, max_tokens=4096).load([reference(image) for image in images])
    assert [picture.original_size[0] for picture in pictures] == [image.size[0] for image in images]


def test_low_detail_takes_few_tokens() -> None:
    loader, image = PictureLoader(CONFIG, max_tokens=4096), noise(1280, 720)
    high, low = loader.load([reference(image, "high"), reference(image, "low")])
    assert high.height * high.width == 1024 * 880
    assert low.height * low.width <= 1024 * 256


def test_pictures_of_pillow_are_taken() -> None:
    loader, image = PictureLoader(CONFIG, max_tokens=4096), noise(300, 200)
    assert loader.load([image]) == loader.load([reference(image)])


def test_broken_picture_of_pillow_is_refused() -> None:
    broken = Image.open(io.BytesIO(encoded(noise(64, 64))[:300]))
    closed = noise(64, 64)
    closed.close()
    for image in (broken, closed):
        with pytest.raises(RequestError, match="picture 1 of the prompt: the picture cannot be decoded"):
            PictureLoader(CONFIG, max_tokens=4096).load([image])


def test_picture_that_comes_back_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = PictureLoader(CONFIG, max_tokens=4096, kept_bytes=3 * 2 * 300 * 320)
    first, second, third = (reference(noise(300, 300, seed=seed)) for seed in range(3))
    [kept] = loader.load([first])
    with monkeypatch.context() as patch:
        patch.setattr(loader_module, "decode_picture", None)
        assert loader.load([first])[0] is kept
    loader.load([second, third])
    assert loader.load([first])[0] is not kept


def test_fault_names_the_picture() -> None:
    loader = PictureLoader(CONFIG, max_tokens=4096)
    broken = PictureReference("data:;base64," + base64.b64encode(png_of_size(500, 500)).decode())
    with pytest.raises(RequestError, match=r"^picture 2 of the prompt: the picture cannot be decoded"):
        loader.load([reference(noise(64, 64)), broken])


def test_slow_hosts_do_not_delay_other_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = Event()

    def read(access: MediaAccess, url: str) -> bytes:
        if url.startswith("http"):
            answering.wait()
        return encoded(noise(64, 64))

    monkeypatch.setattr(MediaAccess, "read", read)
    loader = PictureLoader(CONFIG, max_tokens=4096)
    slow = [loader.submit(PictureReference(f"https://slow.example/{number}")) for number in range(20)]
    assert loader.load([PictureReference("data:")])[0].original_size == (64, 64)
    assert not any(future.done() for future in slow)
    answering.set()
    assert {future.result().digest for future in slow} == {loader.load([noise(64, 64)])[0].digest}


def test_number_of_pictures_is_limited() -> None:
    loader = PictureLoader(CONFIG, max_tokens=4096, max_pictures=1)
    with pytest.raises(RequestError, match="at most 1 pictures, got 2; raise --limit-mm-per-prompt"):
        loader.load([reference(noise(64, 64))] * 2)


def test_missing_pillow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "is_pillow_installed", lambda: False)
    with pytest.raises(RequestError, match=r"pip install 'strandline\[images\]'"):
        PictureLoader(CONFIG, max_tokens=4096).load([reference(noise(64, 64))])


def test_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    model = save_vision_model("qwen3_5-vision", tmp_path / "model")
    config = EngineConfig(model=str(model), allowed_local_media_path=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="--allowed-local-media-path must be a directory"):
        new_loader(config, model)


@pytest.mark.parametrize(
    "name", ["https://example.com", "example.com:443", "*.example.com", "a.com,b.com", "a.com/b", ""]
)
def test_allowed_domains_that_no_url_can_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains must be names of hosts"):
        EngineConfig(model="demo", allowed_media_domains=[name])


@pytest.mark.parametrize(
    "name", ["images.example.com", "localhost", "10.0.0.1", "::1", "fd00::10:1", "xn--bcher-kva.example"]
)
def test_allowed_domains_may_be_names_and_addresses(name: str) -> None:
    assert EngineConfig(model="demo", allowed_media_domains=[name]).allowed_media_domains == [name]
