"""The result of one scan of a map serves all readers of the map with the same stamp, and no other reader."""

import gc

import pytest
import torch

from torchrec_dyn import ops
from torchrec_dyn.storage import CanonicalRows, IdMap, canonical_rows

Listed = tuple[list[int], list[int]]


class Scans:
    """Counts the scans of maps by the named ops."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        patch.setattr(ops, "count_cells", self._counted("count_cells"))

    def _counted(self, name: str):
        real = getattr(ops, name)

        def scan(*arguments):
            self.seen.append(name)
            return real(*arguments)

        return scan


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Scans:
    gc.collect()  # readers of earlier tests keep scans
    monkeypatch.setattr(canonical_rows, "_kept", [])
    return Scans(monkeypatch)


def filled(ids: list[int]) -> IdMap:
    id_map = IdMap(100)
    id_map.reserve(100)
    id_map.insert(torch.tensor(ids), torch.arange(len(ids)))
    return id_map


def listed(reader: CanonicalRows, most: int = 1000) -> Listed:
    pieces = [torch.stack(piece) for piece in reader.by_row(100, most)]
    ids, rows = torch.cat(pieces, dim=1).tolist()
    return ids, rows


def test_readers_of_one_moment_share_scans(scans: Scans) -> None:
    id_map = filled([30, 10, 20])
    readers = [CanonicalRows(id_map, "t", lambda: (7,)) for _ in range(2)]
    assert [listed(reader) for reader in readers] == [([30, 10, 20], [0, 1, 2])] * 2
    assert listed(readers[1], most=2) == ([30, 10, 20], [0, 1, 2])
    assert readers[0].read(0, 3)[0].equal(readers[1].read(0, 3)[0])
    assert scans.seen.count("count_cells") == 1


def test_readers_of_a_later_moment_scan_again(scans: Scans) -> None:
    id_map = filled([30, 10, 20])
    before = CanonicalRows(id_map, "t", lambda: (7,))
    assert listed(before) == ([30, 10, 20], [0, 1, 2])
    assert before.read(0, 3)[0].numel() == 3
    id_map.insert(torch.tensor([40]), torch.tensor([3]))
    after = CanonicalRows(id_map, "t", lambda: (8,))
    assert listed(after) == ([30, 10, 20, 40], [0, 1, 2, 3])
    assert after.read(0, 4)[0].numel() == 4


def test_readers_of_other_maps_scan_again(scans: Scans) -> None:
    maps = [filled([30, 10]), filled([1, 2, 3])]
    readers = [CanonicalRows(id_map, "t", lambda: (7,)) for id_map in maps]
    assert [listed(reader) for reader in readers] == [([30, 10], [0, 1]), ([1, 2, 3], [0, 1, 2])]
    assert [reader.read(0, reader.count)[0].numel() for reader in readers] == [2, 3]


def test_nothing_is_read_after_a_change() -> None:
    moment = [7]
    reader = CanonicalRows(filled([30, 10]), "t", lambda: moment[0])
    moment[0] = 8
    with pytest.raises(RuntimeError, match="expected the table as it was"):
        reader.read(0, 1)
