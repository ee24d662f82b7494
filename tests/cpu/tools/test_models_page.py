"""The generated tables of the models' page follow from the code, and have every architecture."""

from strandline.models.registry import ARCHITECTURES
from tools.models_page import FAMILIES, FURTHER, HEADER, KINDS, MODELS, PAGE, RECURRENCES, build, page, row


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: PYTHONPATH=src python tools/models_page.py"


def test_every_builder_has_a_model() -> None:
    assert {ARCHITECTURES[name] for name in MODELS} == set(ARCHITECTURES.values())


def test_every_architecture_has_a_row() -> None:
    assert list(FAMILIES) == list(ARCHITECTURES)


def test_every_recurrence_has_a_row() -> None:
    assert set(RECURRENCES.values()) <= set(KINDS)
    operations = {x.name for name, model in MODELS.items() for x in build(name, model).operations}
    prefills = {name for name in operations if name.endswith("_prefill")}
    assert prefills - {"causal_conv1d_prefill"} == set(RECURRENCES)


def test_every_model_can_be_deterministic() -> None:
    """``test_deterministic_families.py`` runs all families, on CPUs and on GPUs."""
    column = HEADER.index("determ.")
    assert {row(name, model)[column] for name, model in (*MODELS.items(), *FURTHER.items())} == {"yes"}
