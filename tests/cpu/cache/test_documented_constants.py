"""The constants in the decision records on the cache have the values that the code has."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

DECISIONS = Path(__file__).parents[3] / "docs" / "decisions"
ROW = re.compile(r"^\| `(\w+)\.([A-Z_]+)` \| `([^`]+)` \|", re.MULTILINE)
FOLDERS = {"scheduler": "engine.scheduling", "waiting": "engine.scheduling"}
FOLDERS |= dict.fromkeys(("placements", "reuse", "worth"), "cache.policy")
RECORDS = ["placement", "worth-and-reuse", "waiting-order"]


def documented(record: str) -> list[tuple[str, str, str]]:
    """Return module, name and value of each row in a record's table of constants."""
    [page] = DECISIONS.glob(f"*-{record}.md")
    return ROW.findall(page.read_text())


@pytest.mark.parametrize("record", RECORDS)
def test_record_documents_constants(record: str) -> None:
    assert documented(record)


@pytest.mark.parametrize(("module", "name", "value"), [row for record in RECORDS for row in documented(record)])
def test_documented_constant_has_its_value(module: str, name: str, value: str) -> None:
    folder = FOLDERS.get(module, "cache")
    assert getattr(import_module(f"strandline.{folder}.{module}"), name) == ast.literal_eval(value)
