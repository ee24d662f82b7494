"""Arrays of any kind come to the device by one copy; a table there takes the rows of each step."""

import numpy as np
import pytest
import torch

from strandline.device.hardware import upload
from strandline.device.hardware.upload import UploadedTable, upload_together
from strandline.device.meta_device import META, zeros_from_meta

ROWS = [[[1, 2]], [[1, 2]], [[1, 3]], [[1, 3], [4, 0]], [[1, 3]], [[1]], [[5, 6, 7]]]


def test_table_holds_the_rows_that_were_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded, plain_upload = list[list[list[int]]](), upload.upload

    def counted(rows_NM: np.ndarray, device: torch.device) -> torch.Tensor:
        uploaded.append(rows_NM.tolist())
        return plain_upload(rows_NM, device)

    monkeypatch.setattr(upload, "upload", counted)
    table = UploadedTable((3, 4), torch.device("cpu"))
    for rows in ROWS:
        rows_NM = np.array(rows, dtype=np.int32)
        table.write(rows_NM)
        assert table.table_NM[: len(rows), : rows_NM.shape[1]].tolist() == rows
    assert uploaded == [rows for index, rows in enumerate(ROWS) if index == 0 or rows != ROWS[index - 1]]
    assert table.table_NM[2].tolist() == [0, 0, 0, 0]
    table.write(np.array([[8, 9]], dtype=np.int32), 2)
    table.write(np.zeros((0, 2), dtype=np.int32), 2)
    table.write(np.array([[8, 9]], dtype=np.int32), 2)
    assert table.table_NM[2].tolist() == [8, 9, 0, 0]
    assert uploaded[-1] == [[8, 9]]
    assert uploaded.count([[8, 9]]) == 1


def test_arrays_come_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they share a copy, as on a GPU."""
    arrays = [
        np.arange(3),
        np.zeros(0, dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        np.array([0.5, 2.0]),
        np.arange(5, dtype=np.uint8),
    ]
    copies = list[torch.Tensor]()

    def copied(pinned: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        copies.append(pinned)
        return pinned

    monkeypatch.setattr(torch.Tensor, "to", copied)
    with zeros_from_meta():
        together = upload_together([*arrays, (7, 8)], META)
    alone = upload_together([*arrays, (7, 8)], torch.device("cpu"))
    assert len(copies) == 1
    for found, plain in zip(together, alone, strict=True):
        assert found.dtype == plain.dtype
        assert found.tolist() == plain.tolist()
    assert [tensor.data_ptr() % 16 for tensor in together] == [0] * len(together)
