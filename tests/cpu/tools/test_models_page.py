"""The generated tables of the models' page follow from the code, and have every architecture."""

from strandline.models.registry import ARCHITECTURES
from tools.models_page import FAMILIES, MODELS, PAGE, page


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: PYTHONPATH=src python tools/models_page.py"


def test_every_builder_has_a_model() -> None:
    assert {ARCHITECTURES[name] for name in MODELS} == set(ARCHITECTURES.values())


def test_every_architecture_has_a_row() -> None:
    assert list(FAMILIES) == list(ARCHITECTURES)
