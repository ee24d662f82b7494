"""Sums of rows on a GPU, where torch divides a row among more threads, the fewer rows there are."""

from tests.cpu.models.layers.parts.test_wide_norm import check_rows


def test_sums_of_rows_depend_on_no_other_row() -> None:
    check_rows("cuda")
