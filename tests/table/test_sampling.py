"""Draws of live ids."""

import torch
from mock_device import CUDA, MockDevice
from table_cases import ids_of, make_table

from torchrec_dyn import knobs
from torchrec_dyn.table import sampling


def test_every_row_is_drawn_as_often(monkeypatch):
    """Chi-squared of 100 rows, drawn 100 times each; the table is read in parts of 30 rows."""
    monkeypatch.setattr(knobs, "IDS_SAMPLED_TOGETHER", 30)
    table = make_table()
    table.find_or_insert(torch.arange(150) * 7)
    table.erase(torch.arange(50) * 7)
    drawn, times = table.sample_ids(10_000, seed=3).unique(return_counts=True)
    assert drawn.tolist() == (torch.arange(50, 150) * 7).tolist()
    # 99 degrees of freedom: the mean is 99, and six standard deviations are 84.
    assert float(((times - 100.0) ** 2 / 100).sum()) < 183


def test_draws_depend_on_the_ids_and_the_seed_only():
    one, other = make_table(), make_table()
    one.find_or_insert(torch.arange(90))
    other.find_or_insert(torch.arange(200).flip(0))
    other.erase(torch.arange(90, 200))
    assert torch.equal(one.sample_ids(40, seed=1), other.sample_ids(40, seed=1))
    assert torch.equal(one.sample_ids(40, 1), one.ids()[sampling.draw_places(90, 40, 1)])
    assert not torch.equal(one.sample_ids(40, seed=1), one.sample_ids(40, seed=2))


def test_a_device_draws_what_the_cpu_draws():
    here = make_table()
    here.find_or_insert(ids_of(*range(70)))
    with MockDevice() as device:
        there = make_table(device=CUDA)
        there.find_or_insert(ids_of(*range(70)).to(CUDA))
        drawn = there.sample_ids(30, seed=4)
        assert drawn.is_cuda and drawn.cpu().tolist() == here.sample_ids(30, seed=4).tolist()
        assert device.mixed == []
