"""The command `python -m torchrec_dyn diff`: what differs between two checkpoints, two deltas or two runs.

Both are read in the same ranges of mixed ids. So checkpoints of different plans and numbers of ranks are
compared number by number.

Legend: M rows of a range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import (
    OPTIMIZER_TENSORS,
    Entry,
    MergedTable,
    PlaceLike,
    SavedChain,
    open_checkpoint,
    read_chain,
)
from torchrec_dyn.ranks import mixed_ranges
from torchrec_dyn.storage import canonical_keys
from torchrec_dyn.tools.inspection import Histogram, titled

_MOST_EXAMPLES = 5
_SMALL = ("step", "clock", "waiting", "removed")
_CONFIG = "optimizer_config"
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size
_Tables = Mapping[str, MergedTable]


def print_difference(first: PlaceLike, second: PlaceLike) -> bool:
    """Prints what differs between two checkpoints or deltas; of two runs, at the first step that differs."""
    chains = [read_chain(path) for path in (first, second)]
    if all(chain.entries for chain in chains):
        return _print_first_difference(*chains)
    for chain in chains:
        if chain.skipped and not chain.entries:
            raise ValueError(
                f"diff: expected an entry that can be read, got {chain.path} without one: "
                f"{' '.join(chain.skipped)} Try again, or give another directory."
            )
    checkpoints = open_checkpoint(first), open_checkpoint(second)
    kinds = ["a delta" if checkpoint.is_delta else "a checkpoint" for checkpoint in checkpoints]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"diff: expected two checkpoints or two deltas, got {kinds[0]} and {kinds[1]}. Apply the delta "
            "first, or compare deltas."
        )
    print(f"first   {first}\nsecond  {second}")
    tables = [
        {key: MergedTable([table]) for key, table in checkpoint.tables.items()}
        for checkpoint in checkpoints
    ]
    return _print_tables(*tables)


def _print_tables(first: _Tables, second: _Tables) -> bool:
    """Prints what differs table by table; returns True if nothing does."""
    is_equal = True
    for key, pair in _pairs(first, second).items():
        lines = [*_lines(*pair)]
        is_equal &= not lines
        print("\n".join(["", key, *(lines or ["  equal"])]), flush=True)
    print(f"\n{'all tables are equal' if is_equal else 'the tables differ'}")
    return is_equal


def _print_first_difference(first: SavedChain, second: SavedChain) -> bool:
    """Prints the first step at which the newest branches of two runs differ; True if there is none."""
    chains = first, second
    branches = [_newest_branch(chain) for chain in chains]
    steps = [step for step in branches[0] if step in branches[1]]
    print(f"first   {first.path}\nsecond  {second.path}\n{len(steps)} steps in both")
    unread = [f"{chain.path}: {line}" for chain in chains for line in chain.skipped]
    print("".join(f"not compared  {line}\n" for line in unread), end="")
    for step in steps:
        entries = [branch[step] for branch in branches]
        if names := _tables_that_differ(*entries):
            # Steps before the first in both may differ, too: removed, unread, or saved by one run only.
            which = "first in both has" if step == steps[0] else "first with"
            print(f"step {step}: the {which} other contents, in {', '.join(names)}")
            tables = [
                _tables_at(chain, entry) for chain, entry in zip(chains, entries, strict=True)
            ]
            if tables[0] and tables[1]:
                _print_tables(tables[0], tables[1])
            return False
    if unread:
        raise ValueError(
            f"diff: expected entries that can be read, got {len(unread)} that cannot, and no difference at "
            f"{len(steps)} steps. Compare single full saves: python -m torchrec_dyn diff "
            f"{first.path}/full-NUMBER/state {second.path}/full-NUMBER/state."
        )
    print("all tables are equal at these steps")
    return bool(steps)


def _newest_branch(chain: SavedChain) -> dict[int, Entry]:
    """Returns the newest entry and those that lead to it by step, oldest first."""
    return {entry.step: entry for entry in [*chain.backward(chain.entries[-1])][::-1]}


def _tables_at(chain: SavedChain, last: Entry) -> dict[str, MergedTable]:
    """Returns the tables at an entry by name; none if an entry that leads to it is missing."""
    saves = [
        {table.name: table for table in open_checkpoint(entry.tables).tables.values()}
        for entry in chain.line_of(last) or ()
    ]
    names = saves[-1] if saves else ()
    return {name: MergedTable([save[name] for save in saves if name in save]) for name in names}


def _tables_that_differ(first: Entry, second: Entry) -> list[str]:
    """Returns a text for each table with other contents."""
    # Optimizer state is not compared where the optimizer has another config: other cuts of columns have other
    # numbers, too.
    differing = []
    sums = first.sums_by_tensor(), second.sums_by_tensor()
    for table in sorted({*sums[0]} | {*sums[1]}):
        if table not in sums[0] or table not in sums[1]:
            differing.append(f"{table} (only in the {'first' if table in sums[0] else 'second'})")
            continue
        ours, theirs = sums[0][table], sums[1][table]
        is_same = ours.get(_CONFIG) == theirs.get(_CONFIG)
        names = [
            name
            for name in sorted({*ours} | {*theirs})
            if ours.get(name) != theirs.get(name) and (is_same or name not in OPTIMIZER_TENSORS)
        ]
        if names:
            differing.append(f"{table} ({', '.join(names)})")
    return differing


def _pairs(
    first: _Tables, second: _Tables
) -> dict[str, tuple[MergedTable | None, MergedTable | None]]:
    """Returns the tables by key; by name where a checkpoint has the model at another place."""
    left = dict(second)
    names = [table.name for table in second.values()]
    by_name = {table.name: key for key, table in second.items() if names.count(table.name) == 1}
    pairs: dict[str, tuple[MergedTable | None, MergedTable | None]] = {}
    for key, table in first.items():
        match = key if key in left else by_name.get(table.name, "")
        pairs[key] = table, left.pop(match, None)
    return pairs | {key: (None, table) for key, table in left.items()}


def _lines(first: MergedTable | None, second: MergedTable | None) -> Iterator[str]:
    """Yields what differs between two tables; nothing if they are equal."""
    if first is None or second is None:
        yield f"  only in the {'second' if first is None else 'first'}"
        return
    saves = first.last, second.last
    yield from _configs_that_differ("", saves[0].config, saves[1].config)
    optimizers = saves[0].optimizer or {}, saves[1].optimizer or {}
    yield from _configs_that_differ("optimizer ", *optimizers)
    for name in _SMALL:
        ours, theirs = (save.read(name) if name in save.names else None for save in saves)
        if not _are_equal(ours, theirs):
            yield titled(name, f"{_in_words(ours)} | {_in_words(theirs)}")
    if (first.embedding_dim, first.dtype) == (second.embedding_dim, second.dtype):
        yield from _rows_that_differ(first, second)


def _rows_that_differ(first: MergedTable, second: MergedTable) -> Iterator[str]:
    differences = _Differences()
    names = [name for name in first.names if name in second.names]
    for rows in _in_same_ranges((first, second), names):
        differences.add(*rows)
    if first.last.num_rows and second.last.num_rows:
        for name in sorted({*first.names} ^ {*second.names}):
            yield titled(name, f"only in the {'first' if name in first.names else 'second'}")
    yield from differences.lines()


def _configs_that_differ(
    prefix: str, first: dict[str, Any], second: dict[str, Any]
) -> Iterator[str]:
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            yield titled(prefix + name, f"{first.get(name)} | {second.get(name)}")


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return (0 if first is None else first.numel()) == (0 if second is None else second.numel())
    return torch.equal(first, second)


def _in_words(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    return str(tensor.item()) if tensor.dim() == 0 else f"{list(tensor.shape)} numbers"


class _Differences:
    """Counts of the rows that differ."""

    def __init__(self) -> None:
        self.common = 0
        self.missing = [0, 0]  # ids that only the first, only the second has
        self.rows: dict[str, int] = {}  # by tensor: common rows that differ
        self.most: dict[str, float] = {}  # by tensor: the largest difference
        self.examples: list[int] = []
        self.negative = 0
        self.by_range = Histogram("ids that differ", 2 ** torch.arange(63, device="cpu"))

    def note_ids(self, ids: Tensor) -> None:
        """Notes ids [M] that one side lacks, or whose rows differ."""
        self.examples += ids[: _MOST_EXAMPLES - len(self.examples)].tolist()
        self.negative += int((ids < 0).sum())
        self.by_range.add(ids[ids >= 0])

    def add(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        """Adds the rows of both tables in one range of mixed ids."""
        keys, other_keys = (canonical_keys(rows["ids"]) for rows in (first, second))
        is_common, is_in_first = torch.isin(keys, other_keys), torch.isin(other_keys, keys)
        differs = torch.zeros(int(is_common.sum()), dtype=torch.bool, device="cpu")
        for name in (name for name in first if name != "ids"):
            ours, theirs = first[name][is_common], second[name][is_in_first]
            differing = _differ(ours, theirs)
            if differing.any():
                self.rows[name] = self.rows.get(name, 0) + int(differing.sum())
                if ours.shape == theirs.shape:
                    gaps = ours[differing].double() - theirs[differing].double()
                    self.most[name] = max(self.most.get(name, 0.0), gaps.abs().max().item())
                differs |= differing
        self.common += len(differs)
        for side, ids in enumerate((first["ids"][~is_common], second["ids"][~is_in_first])):
            self.missing[side] += len(ids)
            self.note_ids(ids)
        self.note_ids(first["ids"][is_common][differs])

    def lines(self) -> Iterator[str]:
        """Yields the lines of the report."""
        for side, count in zip(("first", "second"), self.missing, strict=True):
            if count:
                yield titled(f"only in the {side}", f"{count:,} ids")
        for name, count in self.rows.items():
            most = self.most.get(name)
            how = "in their columns" if most is None else f"by at most {most:.3g}"
            yield titled(name, f"{count:,} of {self.common:,} rows differ, {how}")
        if self.examples:
            yield titled("for example", ", ".join(map(str, self.examples)))
            yield "  ids that differ, by range"
            if self.negative:
                yield f"    negative  {self.negative:,}"
            yield from (f"    {line}" for line in self.by_range.lines())


def _differ(first: Tensor, second: Tensor) -> Tensor:
    """Returns for each row [M] whether its bits differ."""
    if first.shape != second.shape:
        return torch.ones(len(first), dtype=torch.bool, device="cpu")
    same = _BITS[first.element_size()]
    differs = first.view(same) != second.view(same)
    return differs if differs.dim() == 1 else differs.any(1)


def _in_same_ranges(
    tables: Sequence[MergedTable], names: Sequence[str]
) -> Iterator[list[dict[str, Tensor]]]:
    """Yields the rows of both tables in ranges of mixed ids that cover all of them; checks their sums."""
    size = max(table.row_bytes_of(names) * table.most_rows for table in tables)
    count = 1 + size // knobs.CHUNK_BYTES
    sums: list[dict[str, int]] = [{}, {}]
    for part in range(count):
        chunks = [
            [*table.chunks(names, mixed=mixed_ranges(part, count), sums=sums_of_table)]
            for table, sums_of_table in zip(tables, sums, strict=True)
        ]
        yield [
            {
                name: torch.cat([table.nothing(name), *(chunk[name] for chunk in read)])
                for name in names
            }
            for table, read in zip(tables, chunks, strict=True)
        ]
    for table, sums_of_table in zip(tables, sums, strict=True):
        table.check_sums(names, sums_of_table)
