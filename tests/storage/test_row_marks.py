"""Marks of rows are read by number, whether they are words or bits."""

import pytest
import torch
from table_cases import ids_of

from torchrec_dyn import knobs
from torchrec_dyn.storage.row_marks import RowMarks

ROWS = 2000


@pytest.mark.parametrize("since", [0, 1, 4, 5, 6])
def test_rows_marked_at_a_number_or_later_are_flagged(monkeypatch, since):
    monkeypatch.setattr(knobs, "MARKED_ROWS", 512)
    marks = RowMarks(ROWS, torch.device("cpu"))
    marks.reserve(ROWS)
    assert len(marks.blocks) == 4
    expected = torch.zeros(marks.capacity, dtype=torch.int32)
    for rows, number in ((ids_of(0, 511, 512, 700), 4), (ids_of(700, 1023, 1999), 5)):
        marks.write(rows, number)
        expected[rows] = number
    marks.bits[2][0] = 1  # row 1024; bits stand for the latest number, which no caller exceeds
    flags = expected >= since
    flags[1024] = True
    assert torch.equal(marks.at_least(since), flags)


def test_a_table_without_rows_has_no_flags():
    assert RowMarks(ROWS, torch.device("cpu")).at_least(1).tolist() == []


def test_marks_made_in_inference_mode_are_written_outside_of_it():
    marks = RowMarks(ROWS, torch.device("cpu"))
    with torch.inference_mode():
        marks.reserve(ROWS)
    marks.write(ids_of(3), 1)
    marks.bits[0][0] = 1
    marks.settle(2)
    marks.fill(3)
    assert marks.read(ids_of(0, 3)).tolist() == [3, 3]
