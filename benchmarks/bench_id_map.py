"""The id map alone, in nanoseconds per id, against other ways to find 64-bit ids on a CPU.

    python benchmarks/bench_id_map.py [--rounds 9] [--threads 1] [--ids 1000000]

Measures lookup by size, load and share of known ids; find_or_insert; growth; erase; and ids that were made to
share slots of the public hash (docs/dev/decisions/0034). Peers in the same run:

- searchsorted: torch.searchsorted over the sorted ids, and the row at that place: a few lines of torch.
- mch: TorchRec's MCHManagedCollisionModule.remap, the same search with its masks. Its insertion is not
  measured: it admits ids by its own schedule.
- pruned: FBGEMM's pruned_hashmap_lookup and _insert, for tables that never change: load 0.5, no growth,
  no erase, the id -1 is reserved.
- sorted merge (insertion): cat and sort of the sorted ids.

FBGEMM's zero_collision_hash (MPZCH) looks up on CPU but does not insert there, so it is not measured.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from axes import MAP_HIT_RATES, MAP_IDS, MAP_LOADS, MAP_QUERIES, raw_ids
from contestants import empty_table
from interleaved import finish, measure, options, ratio, result, spread, summary
from layouts import IdMap
from torch import Tensor
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_dyn import ops

Sides = dict[str, Callable[[int], object]]
# The highest load of a table's own map; the peers are compared with it.
OUR_LOAD = "load 0.625"
BATCHES = 4


def map_of(ids: Tensor, load: float) -> IdMap:
    """Returns a map that holds `ids` in rows 0, 1, 2, ...

    Args:
        ids: [M] int64, distinct.
        load: load of the map, ids / slots.
    """
    count = ids.numel()
    capacity = (int(count / load) // 4 + 1) * 4  # whole lines
    rows, bounds = torch.arange(count), torch.tensor([0, count])
    made = IdMap()
    if hasattr(ops, "new_slots"):
        made.slots = ops.new_slots(made.slots, capacity)
        ops.insert(ids, rows, bounds, *made.arrays())
    else:  # an old base of make bench-ab, whose maps grow in one pass
        slots = torch.full((2 * count, 2), -1, dtype=torch.int64)
        ops.insert(ids, rows, bounds, [slots])
        made.slots = ops.rehash(slots, capacity)
    made.num_ids = count
    return made


def copy_of(one: IdMap) -> IdMap:
    """Returns a copy of a map that is not growing, on huge pages as well."""
    made = IdMap()
    made.slots, made.num_ids = ops.new_slots(one.slots, one.slots.shape[0]), one.num_ids
    made.key = getattr(one, "key", 0)  # maps had none until November 2026
    made.slots.copy_(one.slots)
    return made


def peers(ids: Tensor, queries: Sequence[Tensor]) -> Sides:
    """Returns the lookups of the peers, filled with the same ids, by name.

    Args:
        ids: [M] int64, distinct.
        queries: batches of ids to look up.
    """
    count = ids.numel()
    in_order, rows = ids.sort()
    mch = MCHManagedCollisionModule(
        count + 1, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1_000_000
    )
    mch._mch_sorted_raw_ids[:-1] = (
        in_order  # as if mch had admitted them; the last place is its delimiter
    )
    mch._mch_remapped_ids_mapping[:-1] = rows
    pruned, bounds = torch.full((2 * count, 2), -1, dtype=torch.int64), torch.tensor([0, 2 * count])
    torch.ops.fbgemm.pruned_hashmap_insert(
        ids, torch.arange(count), torch.tensor([0, count]), pruned, bounds
    )
    asked = torch.tensor([0, queries[0].numel()])
    lengths = torch.ones(queries[0].numel(), dtype=torch.int64)

    def searchsorted(turn: int) -> Tensor:
        query = queries[turn % BATCHES]
        place = torch.searchsorted(in_order, query).clamp_(max=count - 1)
        return torch.where(in_order[place] == query, rows[place], -1)

    return {
        "searchsorted": searchsorted,
        "mch": lambda turn: mch.remap(
            {"f": JaggedTensor(queries[turn % BATCHES], lengths=lengths)}
        ),
        "pruned": lambda turn: torch.ops.fbgemm.pruned_hashmap_lookup(
            queries[turn % BATCHES], asked, pruned, bounds
        ),
    }


def queries_of(count: int, hit_rate: float, size: int) -> list[Tensor]:
    """Draws batches of `size` ids; `hit_rate` is the share of ids among the `count` known ids."""
    numbers = torch.randint(0, count, (BATCHES, size))
    unknown = torch.rand(BATCHES, size) >= hit_rate
    return list(raw_ids(torch.where(unknown, numbers + count, numbers).flatten()).chunk(BATCHES))


def lookups(count: int, size: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures lookups in a map of `count` ids."""
    ids = raw_ids(torch.arange(count))
    maps = {f"load {load}": map_of(ids, load) for load in MAP_LOADS}
    for hit_rate in MAP_HIT_RATES:
        queries = queries_of(count, hit_rate, size)
        others = peers(ids, queries)
        ours: Sides = {
            name: lambda turn, one=one, queries=queries: one.lookup(queries[turn % BATCHES])
            for name, one in maps.items()
        }
        seconds = measure({**ours, **others}, arguments.rounds, clock=arguments.clock)
        numbers = summary(seconds, size)
        line = "".join(f"{numbers[name]['median_ns']:8.1f}" for name in (*ours, *others))
        print(f"{count:10,} {hit_rate:4.0%} known {line}")
        for name in others:
            yield result(
                f"{count} ids", torch.get_num_threads(), f"lookup, {hit_rate:.0%} known", name,
                ratio(seconds, name, OUR_LOAD), in_mean=name != "mch", ns_per_id=numbers,
            )  # fmt: skip


def with_neighbouring_hashes(count: int) -> Tensor:
    """Returns ids [count] that have consecutive hashes with key 0: mix64(id) * 2^64/phi."""
    words = (torch.arange(count) + 2**40) * _inverse(0x9E3779B97F4A7C15)
    words = words ^ _shifted(words, 31) ^ _shifted(words, 62)
    words = words * _inverse(0x94D049BB133111EB)
    words = words ^ _shifted(words, 27) ^ _shifted(words, 54)
    words = words * _inverse(0xBF58476D1CE4E5B9)
    return words ^ _shifted(words, 30) ^ _shifted(words, 60)


def _inverse(factor: int) -> int:
    word = pow(factor, -1, 2**64)
    return word - 2**64 if word >> 63 else word


def _shifted(words: Tensor, by: int) -> Tensor:
    return words >> by & (1 << 64 - by) - 1


def changes(count: int, size: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures find_or_insert, growth and erase of a map of `count` ids."""
    ids = raw_ids(torch.arange(count))
    table = empty_table("table", count + size, 16)
    table.find_or_insert(ids)
    known = queries_of(count, 1.0, size)
    fresh = raw_ids(torch.arange(count, count + size))
    crafted = with_neighbouring_hashes(size)
    in_order, _ = ids.sort()
    batch = ids[: min(size, count // 2)]
    full = map_of(ids, 0.74)  # above the highest load of a table's map: `reserve` makes it grow
    copies: dict[str, IdMap] = {}

    def back_to_start(_: int) -> None:
        table.erase(fresh)
        table.erase(crafted)
        copies.update(erase=copy_of(full), growth=copy_of(full))

    pruned, bounds = torch.full((2 * size, 2), -1, dtype=torch.int64), torch.tensor([0, 2 * size])

    def fill_pruned(_: int) -> None:
        pruned.fill_(-1)
        torch.ops.fbgemm.pruned_hashmap_insert(
            fresh, torch.arange(size), torch.tensor([0, size]), pruned, bounds
        )

    sides: Sides = {
        "known": lambda turn: table.find_or_insert(known[turn % BATCHES]),
        "new": lambda _: table.find_or_insert(fresh),
        "crafted": lambda _: table.find_or_insert(crafted),
        "sorted merge": lambda _: torch.cat([in_order, fresh]).sort(),
        "pruned": fill_pruned,
        "erase": lambda _: ops.erase(batch, *copies["erase"].arrays()),
        "growth": lambda _: copies["growth"].reserve(count // 10),
    }
    units = dict.fromkeys(sides, size) | {"erase": batch.numel(), "growth": count}
    seconds = measure(sides, arguments.rounds, clock=arguments.clock, before=back_to_start)
    numbers = {name: summary({name: seconds[name]}, units[name])[name] for name in sides}
    print(f"{count:10,} {'':10} " + "".join(f"{numbers[n]['median_ns']:13.1f}" for n in sides))
    for against in ("sorted merge", "pruned", "crafted"):
        yield result(
            f"{count} ids", torch.get_num_threads(), "find_or_insert, all new", against,
            ratio(seconds, against, "new"), in_mean=False, ns_per_id=numbers,
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all sizes and prints two tables."""
    parser = options(__doc__, [1])
    parser.add_argument("--ids", type=int, nargs="+", default=MAP_IDS, help="sizes of the map")
    arguments = parser.parse_args(argv)
    sizes, queries = ([1_000], 500) if arguments.quick else (arguments.ids, MAP_QUERIES)
    rows: list[dict[str, Any]] = []
    parts = (
        (lookups, "".join(f"{f'at {load}':>8}" for load in MAP_LOADS) + "  sorted     mch  pruned"),
        (changes, "".join(f"{name:>13}" for name in
                          ("known", "new", "crafted new", "sorted merge", "pruned: new", "erase", "growth"))),
    )  # fmt: skip
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for part, heading in parts:
            print(f"{threads} threads, ns an id of {part.__name__}\n{'ids':>10} {'':10} {heading}")
            for count in sizes:
                for line in part(count, queries, arguments):
                    rows.append(line)
                gc.collect()
    near = [
        row for row in rows if row["against"] == "pruned" and row["what"] == "lookup, 100% known"
    ]
    for row in near:
        seen = (row["ratio"], *row["ratio_quartiles"])
        print(f"{row['workload']}, {row['threads']} threads: lookup {spread(seen)} against pruned")
    finish("id_map", rows, arguments)


if __name__ == "__main__":
    main()
