"""A rank finds the places of its rows by a few saved ids, and reads no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import unmixed

from torchrec_dyn import knobs
from torchrec_dyn.ranks import ids_per_rank, mixed_ranges, owners
from torchrec_dyn.storage import canonical_order, first_place


def places_of_part(
    read: Callable[[int, int], torch.Tensor], total: int, part: int, ranks: int
) -> list[tuple[int, int]]:
    """The ranges of places that a load reads (SavedTable.place_of), without those that are empty."""
    ends = [
        (first_place(read, total, own.start), first_place(read, total, own.stop))
        for own in mixed_ranges(part, ranks)
    ]
    return [(begin, end) for begin, end in ends if begin < end]


def ids_at_all_bounds(ranks: int, some: torch.Tensor) -> torch.Tensor:
    """Some ids, those at both ends of each range, and all ids after the last range, in canonical order."""
    share = ids_per_rank(ranks)
    bounds = [part * share - 1 + i for part in range(1, ranks) for i in range(2)]
    after = range(share * ranks, 2**64) if ranks > 1 else ()
    signed = [mixed - 2**64 if mixed >= 2**63 else mixed for mixed in (*bounds, *after)]
    ids = unmixed(torch.cat([some, torch.tensor(signed, dtype=torch.int64)]).unique())
    return ids[canonical_order(ids)]


def check(ids: torch.Tensor, ranks: int) -> int:
    """Compares the places of some parts with the owners; returns the most ids read for one."""
    of_parts = owners(ids, ranks) if ranks > 1 else torch.zeros_like(ids)
    most = 0
    for part in [*range(min(ranks, 16)), ranks - 1]:
        mine, read = (of_parts == part).nonzero().flatten().tolist(), 0

        def ids_of(first: int, last: int) -> torch.Tensor:
            nonlocal read
            read += last - first
            return ids[first:last]

        found = places_of_part(ids_of, len(ids), part, ranks)
        assert [place for one in found for place in range(*one)] == mine
        most = max(most, read)
    return most


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16, 1024])
@pytest.mark.parametrize("at_once", [1, 100, 1 << 14])
def test_the_places_of_a_part_are_those_of_its_rows(
    ranks: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs, "IDS_READ_TOGETHER", at_once)
    mixed = torch.randint(-(2**63), 2**63 - 1, (3000,))
    most = check(ids_at_all_bounds(ranks, mixed), ranks)
    if at_once == 1:
        assert most < 4 * 13 + 2 * ranks


def test_mixed_ids_that_are_not_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone may choose ids whose mixed ids are close together: then the search takes longer."""
    monkeypatch.setattr(knobs, "IDS_READ_TOGETHER", 10)
    close = torch.arange(4000) + 2**62
    for ranks in (2, 3, 8):
        check(ids_at_all_bounds(ranks, close), ranks)


def test_no_ids() -> None:
    assert not places_of_part(lambda *_: torch.empty(0).long(), 0, 1, 3)


def test_few_ids_of_a_large_table_are_read() -> None:
    """2^34 ids: four searches halve what is left."""
    reads: list[int] = []

    def ids_of(first: int, last: int) -> torch.Tensor:
        reads.append(last - first)
        assert last - first <= 1 << 14
        mixed = torch.arange(first, last) * 2**30  # modulo 2^64, as an unsigned word
        return unmixed(mixed)

    found = places_of_part(ids_of, 2**34, 5, 1016)
    ((begin, end),) = found
    share = ids_per_rank(1016)
    assert (begin - 1) * 2**30 < 5 * share <= begin * 2**30
    assert (end - 1) * 2**30 < 6 * share <= end * 2**30
    assert len(reads) <= 4 * 21
