"""The command `python -m torchrec_dyn diff`: what differs between two checkpoints or two deltas.

Both are read once, in chunks, in canonical order. It is the same under every plan, so checkpoints of
different plans and numbers of ranks are compared number by number.

Legend: M rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    OPTIMIZER_TENSORS,
    Entry,
    SavedChain,
    SavedCheckpoint,
    SavedTable,
    open_checkpoint,
    read_chain,
)
from torchrec_dyn.storage import canonical_keys
from torchrec_dyn.tools.inspection import Histogram, titled

_MOST_EXAMPLES = 5
_SMALL = ("step", "clock", "waiting", "removed")
_CONFIG = "optimizer_config"
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


def print_difference(first: Path, second: Path) -> bool:
    """Prints what differs between the dynamic tables of two checkpoints, of two deltas, or of two runs.

    Of two directories of `Checkpoints` it prints the first step at which tables differ, by the sums of the
    entries, and what differs there if both have a full save of that step, or a delta since the same step.

    Returns:
        True if all tables are equal, bit for bit.

    Raises:
        ValueError: if one is torn, damaged or no checkpoint, or one is a delta and the other is not; of
            directories of `Checkpoints`, if no entry can be read, or some cannot and the others are equal.
        OSError: if a file cannot be read.
    """
    chains = [read_chain(path) for path in (first, second)]
    if all(chain.entries for chain in chains):
        return _print_first_difference(*chains)
    for chain in chains:
        if chain.skipped and not chain.entries:
            raise ValueError(
                f"diff: expected an entry that can be read, got {chain.path} without one: "
                f"{' '.join(chain.skipped)} Try again, or give another directory."
            )
    one, other = open_checkpoint(first), open_checkpoint(second)
    if one.is_delta != other.is_delta:
        kinds = ("a checkpoint", "a delta")
        raise ValueError(
            f"diff: expected two checkpoints or two deltas, got {kinds[one.is_delta]} and "
            f"{kinds[other.is_delta]}. Apply the delta first, or compare deltas."
        )
    print(f"first   {first}\nsecond  {second}")
    is_equal = True
    for name, pair in _pairs(one, other).items():
        lines = list(_lines(*pair))
        is_equal &= not lines
        print("\n".join(["", name, *(lines or ["  equal"])]), flush=True)
    print(f"\n{'all tables are equal' if is_equal else 'the tables differ'}")
    return is_equal


def _print_first_difference(one: SavedChain, other: SavedChain) -> bool:
    """Prints the first step at which two runs differ; returns True if there is none.

    Of each run it takes the branch that leads to the newest entry, and prints which entries cannot be read.

    Raises:
        ValueError: if the runs are equal as far as entries can be read, and some cannot.
    """
    branches = [[*chain.backward(chain.entries[-1])][::-1] for chain in (one, other)]
    mine, theirs = ({entry.step: entry for entry in branch} for branch in branches)
    both = [(entry, theirs[step]) for step, entry in mine.items() if step in theirs]
    print(f"first   {one.path}\nsecond  {other.path}\n{len(both)} steps in both")
    unread = [f"{chain.path}: {line}" for chain in (one, other) for line in chain.skipped]
    print("".join(f"not compared  {line}\n" for line in unread), end="")
    before: tuple[Entry, Entry] | None = None
    for pair in both:
        if found := _tables_that_differ(*pair):
            # Steps before the first in both may differ, too: removed, unread, or saved by one run only.
            which = "first with" if before else "first in both has"
            print(f"step {pair[0].step}: the {which} other contents, in {', '.join(found)}")
            if _are_of_one_kind(pair, before):
                print_difference(pair[0].tables, pair[1].tables)
            return False
        before = pair
    if unread:
        raise ValueError(
            f"diff: expected entries that can be read, got {len(unread)} that cannot, and no difference at "
            f"{len(both)} steps. Compare single full saves: python -m torchrec_dyn diff "
            f"{one.path}/full-NUMBER/state {other.path}/full-NUMBER/state."
        )
    print("all tables are equal at these steps")
    return bool(both)


def _tables_that_differ(mine: Entry, its: Entry) -> list[str]:
    """Returns a text for each table with other contents.

    Optimizer state is not compared where the optimizer has another config: other cuts of columns have other
    numbers, too.
    """
    found = []
    ours, theirs = mine.sums_by_tensor(), its.sums_by_tensor()
    for table in sorted({*ours} | {*theirs}):
        if table not in ours or table not in theirs:
            found.append(f"{table} (only in the {'first' if table in ours else 'second'})")
            continue
        one, other = ours[table], theirs[table]
        is_same = one.get(_CONFIG) == other.get(_CONFIG)
        names = [
            name
            for name in sorted({*one} | {*other})
            if one.get(name) != other.get(name) and (is_same or name not in OPTIMIZER_TENSORS)
        ]
        if names:
            found.append(f"{table} ({', '.join(names)})")
    return found


def _are_of_one_kind(pair: tuple[Entry, Entry], before: tuple[Entry, Entry] | None) -> bool:
    """Returns True for two full saves, or two deltas that begin at the pair before."""
    if pair[0].is_full and pair[1].is_full:
        return True
    begins = None if before is None else [entry.id for entry in before]
    return not pair[0].is_full and not pair[1].is_full and begins == [one.parent for one in pair]


def _pairs(
    one: SavedCheckpoint, other: SavedCheckpoint
) -> dict[str, tuple[SavedTable | None, SavedTable | None]]:
    """Returns the tables by key; by name where a checkpoint has the model at another place."""
    theirs = dict(other.tables)
    by_name: dict[str, list[str]] = {}
    for key, table in theirs.items():
        by_name.setdefault(table.name, []).append(key)
    pairs: dict[str, tuple[SavedTable | None, SavedTable | None]] = {}
    for key, table in one.tables.items():
        same_name = by_name.get(table.name, [])
        found = key if key in theirs else same_name[0] if len(same_name) == 1 else None
        pairs[key] = (table, None if found is None else theirs.pop(found, None))
    return pairs | {key: (None, table) for key, table in theirs.items()}


def _lines(one: SavedTable | None, other: SavedTable | None) -> Iterator[str]:
    """Yields what differs between two tables; nothing if they are equal."""
    if one is None or other is None:
        yield f"  only in the {'second' if one is None else 'first'}"
        return
    yield from _of_configs("", one.config, other.config)
    yield from _of_configs("optimizer ", one.optimizer or {}, other.optimizer or {})
    for name in _SMALL:
        mine, theirs = (table.read(name) if name in table.names else None for table in (one, other))
        if not _are_equal(mine, theirs):
            yield titled(name, f"{_in_words(mine)} | {_in_words(theirs)}")
    if (one.embedding_dim, one.dtype) == (other.embedding_dim, other.dtype):
        yield from _of_rows(one, other)


def _of_configs(prefix: str, one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            yield titled(prefix + name, f"{one.get(name)} | {other.get(name)}")


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return (0 if one is None else one.numel()) == (0 if other is None else other.numel())
    return torch.equal(one, other)


def _in_words(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    return str(tensor.item()) if tensor.dim() == 0 else f"{list(tensor.shape)} numbers"


@dataclass
class _Differences:
    """Counts of the rows that differ."""

    common: int = 0
    # Numbers of ids that only the first, only the second has.
    missing: list[int] = field(default_factory=lambda: [0, 0])
    rows: dict[str, int] = field(default_factory=dict)  # by tensor: common rows that differ
    most: dict[str, float] = field(default_factory=dict)  # by tensor: the largest difference
    examples: list[int] = field(default_factory=list)
    negative: int = 0
    by_range: Histogram = field(
        default_factory=lambda: Histogram("ids that differ", 2 ** torch.arange(63, device="cpu"))
    )

    def note_ids(self, ids: Tensor) -> None:
        """Notes ids [M] that one side lacks, or whose rows differ."""
        self.examples += ids[: _MOST_EXAMPLES - len(self.examples)].tolist()
        self.negative += int((ids < 0).sum())
        self.by_range.add(ids[ids >= 0])


def _of_rows(one: SavedTable, other: SavedTable) -> Iterator[str]:
    found = _Differences()
    names = [name for name in one.row_names if name in other.row_names and name != "ids"]
    for mine, theirs in _merged(one, other, ["ids", *names]):
        _compare(names, mine, theirs, found)
    for name in {*one.row_names} ^ {*other.row_names}:
        if one.num_rows and other.num_rows:
            yield titled(name, f"only in the {'first' if name in one.row_names else 'second'}")
    for side, count in zip(("first", "second"), found.missing, strict=True):
        if count:
            yield titled(f"only in the {side}", f"{count:,} ids")
    for name in names:
        if found.rows.get(name):
            most = found.most.get(name)
            how = "in their columns" if most is None else f"by at most {most:.3g}"
            yield titled(name, f"{found.rows[name]:,} of {found.common:,} rows differ, {how}")
    if found.examples:
        yield titled("for example", ", ".join(map(str, found.examples)))
        yield "  ids that differ, by range"
        if found.negative:
            yield f"    negative  {found.negative:,}"
        yield from (f"    {line}" for line in found.by_range.lines("#"))


def _compare(
    names: Sequence[str], mine: dict[str, Tensor], theirs: dict[str, Tensor], found: _Differences
) -> None:
    """Compares rows whose ids lie in the same part of the canonical order."""
    ids, others = mine["ids"], theirs["ids"]
    keys, other_keys = canonical_keys(ids), canonical_keys(others)
    places = torch.searchsorted(other_keys, keys)
    is_common = places < len(others)
    is_common[is_common.clone()] = other_keys[places[is_common]] == keys[is_common]
    here, there = is_common.nonzero().flatten(), places[is_common]
    is_alone = torch.ones(len(others), dtype=torch.bool, device="cpu")
    is_alone[there] = False
    differs = torch.zeros(len(here), dtype=torch.bool, device="cpu")
    for name in names:
        a, b = mine[name][here], theirs[name][there]
        own = _differ(a, b)
        if own.any():
            found.rows[name] = found.rows.get(name, 0) + int(own.sum())
            if a.shape == b.shape:
                gap = (a[own].double() - b[own].double()).abs().max().item()
                found.most[name] = max(found.most.get(name, 0.0), gap)
            differs |= own
    found.common += len(here)
    for side, alone in enumerate((ids[~is_common], others[is_alone])):
        found.missing[side] += len(alone)
        found.note_ids(alone)
    found.note_ids(ids[here[differs]])


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Returns for each row [M] whether its bits differ."""
    if one.shape != other.shape:
        return torch.ones(len(one), dtype=torch.bool, device="cpu")
    same = _BITS[one.element_size()]
    differs = one.view(same) != other.view(same)
    return differs if differs.dim() == 1 else differs.any(1)


def _merged(
    one: SavedTable, other: SavedTable, names: Sequence[str]
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Yields the rows of both, in the same parts of the canonical order."""
    streams = [table.chunks(names) if table.num_rows else iter(()) for table in (one, other)]
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    held = [dict.fromkeys(names, nothing) for _ in streams]
    while True:
        for side, stream in enumerate(streams):
            if not len(held[side]["ids"]):
                held[side] = next(stream, held[side])
        if not any(len(rows["ids"]) for rows in held):
            return
        # An empty side is at its end. Else the smaller of the last ids is the end of what both have read.
        ends = [canonical_keys(rows["ids"][-1:]).item() for rows in held if len(rows["ids"])]
        cuts = [
            int(torch.searchsorted(canonical_keys(rows["ids"]), min(ends), right=True))
            for rows in held
        ]
        mine, theirs = (
            {name: rows[name][:cut] for name in names} for rows, cut in zip(held, cuts, strict=True)
        )
        yield mine, theirs
        held = [
            {name: rows[name][cut:] for name in names} for rows, cut in zip(held, cuts, strict=True)
        ]
