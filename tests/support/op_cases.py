"""Cases of the fuzzer: for each op a function that draws valid arguments, and one that checks a call.

The cases are in the other files op_cases_*.py, by the rooms of csrc/library.cpp.
A check computes the result from the arguments as they were before the call, in plain Python and numpy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from oracle import EXTREME_IDS, ids_at_home
from torch import Tensor

I64 = torch.int64
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Arguments = dict[str, Any]


class Refused(Exception):
    """The arguments break the rules of the op: it had to raise an error."""


class Unjudged(Exception):
    """The arguments are legal or not, and the result means nothing: the map is damaged."""


class Case(NamedTuple):
    """An op.

    Attributes:
        draw: returns new valid arguments.
        check: gets copies of the arguments from before the call, the arguments after it, and the result;
            raises AssertionError for a wrong result.
    """

    draw: Callable[[random.Random], Arguments]
    check: Callable[[Arguments, Arguments, Any], None]


CASES: dict[str, Case] = {}


def register(names: dict[str, Any]) -> None:
    """Registers the cases of a file: the functions `draw_<op>` and `check_<op>`."""
    for name, draw in names.items():
        op = name.removeprefix("draw_")
        if op != name and f"check_{op}" in names:
            CASES[op] = Case(draw, names[f"check_{op}"])


def need(rule: bool, says: str) -> None:
    """Raises Refused if a rule of the op does not hold."""
    if not rule:
        raise Refused(says)


def equal(got: Tensor, expected: Any, what: str = "the result") -> None:
    """Asserts that numbers are equal, in any shape; NaNs are equal."""
    got, expected = got.detach().flatten(), torch.as_tensor(expected).flatten()
    assert got.shape == expected.shape, f"{what}: {len(got)} numbers, expected {len(expected)}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    same = (got == expected) | ((got != got) & (expected != expected))
    if not same.all():
        where = int(same.logical_not().nonzero()[0])
        raise AssertionError(f"{what}[{where}]: {got[where]}, expected {expected[where]}")


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=I64)


def numbers(tensor: Tensor, what: str) -> list[int]:
    need(tensor.dtype == I64, f"{what} of dtype int64")
    return tensor.flatten().tolist()


# Valid arguments


def size(rng: random.Random, most: int = 6000) -> int:
    """Returns a number of ids or rows: small, or above the grain at which threads share the work."""
    few = rng.choice((0, 1, 2, 3, 5, 8, 13, 40, 40, 120))
    return min(most, few if rng.random() < 0.95 else rng.randint(600, 6000))


def some_ids(rng: random.Random, count: int) -> list[int]:
    """Returns ids: extreme, small, any, or with one home."""
    crowd = ids_at_home(rng.choice((0, 4, 8)), rng.choice((8, 12, 16)), 12)
    kinds = (
        lambda: rng.choice(EXTREME_IDS),
        lambda: rng.randrange(60),
        lambda: rng.randrange(-(2**63), 2**63),
        lambda: rng.choice(crowd),
    )
    return [rng.choice(kinds)() for _ in range(count)]


def cuts(rng: random.Random, count: int, parts: int) -> list[int]:
    """Returns [parts + 1] ascending numbers from 0 to `count`; [0] without parts, which requires 0."""
    if parts == 0:
        return [0]
    return [0, *sorted(rng.randint(0, count) for _ in range(parts - 1)), count]


def numbers_of(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns floats, some of them NaN, infinite, or zero with either sign."""
    draw = torch.Generator().manual_seed(rng.getrandbits(40))
    drawn = torch.randn(shape, generator=draw)
    odd = torch.tensor([0.0, -0.0, 1.0, 1e-40, 3e38, float("inf"), float("-inf"), float("nan")])
    if rng.random() < 0.2 and drawn.numel():
        for _ in range(rng.randint(1, 4)):
            drawn.view(-1)[rng.randrange(drawn.numel())] = odd[rng.randrange(len(odd))]
    return drawn.to(dtype)


def a_shift(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 2, 3, 5))


def with_short_last(rng: random.Random, blocks: list[Tensor]) -> list[Tensor]:
    """Returns the blocks; in some calls the last block has fewer rows."""
    if blocks and rng.random() < 0.3:
        blocks[-1] = blocks[-1][: rng.randint(1, len(blocks[-1]))]
    return blocks


def a_width(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 4, 7, 15, 16, 17, 33, 64, 130))


# The rules of arguments that several ops share


def check_offsets(offsets: Tensor, tables: int, count: int) -> list[int]:
    """Returns the table offsets of `count` ids."""
    listed = numbers(offsets, "table_offsets")
    need(len(listed) == tables + 1, "T + 1 table_offsets")
    need(listed[0] == 0 and listed[-1] == count, "table_offsets from 0 to N")
    need(sorted(listed) == listed, "ascending table_offsets")
    return listed


def rows_of_blocks(
    blocks: list[Tensor], shift: int, columns: int, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Returns the rows [R, columns] of one table as one tensor; None without blocks."""
    need(0 <= shift < 32 and 1 <= columns < 2**31, "shift in [0, 32) and columns in [1, 2^31)")
    for place, block in enumerate(blocks):
        rows, rest = divmod(block.numel(), columns)
        is_whole, is_last = rows == 1 << shift, place == len(blocks) - 1
        need(rest == 0 and rows > 0, "blocks of whole rows")
        need(
            is_whole or (is_last and rows < 1 << shift), "blocks of 2^shift rows, the last of fewer"
        )
        need(block.dtype == (dtype or blocks[0].dtype), "blocks of one dtype")
    return torch.cat([block.reshape(-1, columns) for block in blocks]) if blocks else None


class Layout(NamedTuple):
    """One line of `layout`."""

    first: int
    blocks: int
    shift: int
    columns: int


def read_layout(layout: Tensor, blocks: int, taken: bool = True) -> list[Layout]:
    """Returns the tables of a layout. `taken`: no block belongs to two tables."""
    need(layout.dtype == I64 and layout.dim() == 2 and layout.shape[1] == 4, "layout [T, 4]")
    tables = [Layout(*line) for line in layout.tolist()]
    owned: set[int] = set()
    for table in tables:
        need(min(table[:2]) >= 0, "block and count >= 0")
        need(0 <= table.shift < 32 and 1 <= table.columns < 2**31, "shift and columns")
        need(table.blocks == 0 or table.first + table.blocks <= blocks, "blocks in the list")
        own = {*range(table.first, table.first + table.blocks)}
        if taken and own & owned:
            raise Unjudged("a block of two tables")
        owned |= own
    return tables


def bits_of_tables(marks: list[Tensor], layout: Tensor | None) -> list[list[int]]:
    """Returns the bits of each table by row (csrc/storage/row_marks.h)."""
    tables: list[list[int]] = []
    for table in [] if layout is None else read_layout(layout, len(marks)):
        need(table.shift >= 6, "whole bytes of 64 stripes")
        own = marks[table.first : table.first + table.blocks]
        joined = rows_of_blocks(own, table.shift, 1, torch.uint8)
        of_block = 8 << table.shift
        tables.append([])
        for row in range(0 if joined is None else of_block * table.blocks):
            block, place = divmod(row, of_block)
            byte = (block << table.shift) + ((row & 63) << (table.shift - 6)) + (place >> 9)
            tables[-1].append(int(joined[byte]) >> (place >> 6 & 7) & 1)
    return tables
