"""A table on the device takes the rows of each step."""

import numpy as np
import pytest
import torch

from strandline.device.hardware import upload
from strandline.device.hardware.upload import UploadedTable

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
