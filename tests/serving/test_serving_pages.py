"""Files of served tables are written in whole huge pages, in which a file system may then keep them."""

from itertools import pairwise

import pytest
import torch
from serving_cases import Plain, bag_configs, save, save_delta
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import knobs, serving
from torchrec_dyn.serving import files

A = Plain("a", 8).with_random(range(500))
MORE = A.with_random(range(400, 700), seed=1)
PAGE = 4096


@pytest.fixture
def writes(monkeypatch):
    """The (file, first byte, bytes) of each write of rows and of empty id maps; pages are small."""
    seen = []

    class Writer(files.FileWriter):
        def write(self, place, data):
            seen.append((self.path.rpartition("/")[2], place, len(memoryview(data))))
            super().write(place, data)

    monkeypatch.setattr(knobs, "HUGE_PAGE_BYTES", PAGE)
    monkeypatch.setattr(files, "FileWriter", Writer)
    monkeypatch.setattr(knobs, "SERVED_CHUNK_BYTES", 100 * 8 * 4)  # 100 rows at a time
    return seen


def assert_whole(writes, end: int, first: int = 0) -> None:
    """Each write but the first begins, and each but the last ends, at a multiple of the page."""
    places = [(place, place + size) for _, place, size in writes]
    assert places[0][0] == first and places[-1][1] == end and len(places) > 1
    assert all(old[1] == new[0] and new[0] % PAGE == 0 for old, new in pairwise(places))


def test_rows_and_maps_are_written_in_whole_pages(tmp_path, writes):
    save(tmp_path / "checkpoint", A)
    serving.build(tmp_path / "checkpoint", tmp_path / "served")
    rows = 500 * 8 * 4
    assert_whole([one for one in writes if one[0].startswith("rows-")], rows)
    size = next((tmp_path / "served").glob("0*/slots")).stat().st_size
    assert_whole([one for one in writes if one[0] == "slots"], size)

    writes.clear()
    save_delta(tmp_path / "delta", [A], [MORE])
    serving.apply_delta(tmp_path / "served", tmp_path / "delta")
    appended = [one for one in writes if one[0].startswith("rows-")]
    assert_whole(appended, rows + 300 * 8 * 4, first=rows)
    ours = serving.ServingEmbeddingBagCollection(tmp_path / "served", bag_configs(MORE))
    ids = torch.arange(700)
    served = ours(KeyedJaggedTensor(["f_a"], ids, lengths=torch.ones(700).long())).values()
    assert torch.equal(served, torch.stack([MORE.rows[i] for i in range(700)]))
