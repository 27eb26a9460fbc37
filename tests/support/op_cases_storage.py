"""The ops of content sums, rows and marks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import oracle
import torch
from op_cases import (
    FLOATS,
    I64,
    Arguments,
    Unjudged,
    a_shift,
    a_width,
    bits_of_tables,
    check_offsets,
    equal,
    need,
    numbers,
    numbers_of,
    read_layout,
    register,
    rows_of_blocks,
    size,
    some_ids,
    whole,
    with_short_last,
)
from torch import Tensor

from torchrec_dyn import ops

# Content sums


def draw_content_sum(rng: random.Random) -> Arguments:
    count, columns = size(rng), rng.choice((0, 1, 2, 3, 16, 40))
    dtype = rng.choice((*FLOATS, I64))
    values = numbers_of(rng, (count, columns), torch.float32)
    return {
        "ids": whole(*some_ids(rng, count)),
        "values": values.nan_to_num(7, 3, -3).to(dtype) if dtype == I64 else values.to(dtype),
        "first_column": rng.choice((0, 1, 5, 2**31 - 1)),
        "key": rng.randrange(-(2**63), 2**63),
    }


def check_content_sum(before: Arguments, _: Arguments, result: Tensor) -> None:
    ids, values = numbers(before["ids"], "ids"), before["values"]
    need(values.dtype in (*FLOATS, I64) and values.dim() == 2, "values [M, D]")
    need(len(values) == len(ids), "a row of values for each id")
    need(0 <= before["first_column"] < 2**31, "first_column in [0, 2^31)")
    halves = 2 if values.dtype == I64 else 1
    words = values.view(torch.int16 if values.dtype in FLOATS[1:] else torch.int32).numpy()
    words = words.view(np.uint16 if words.dtype == np.int16 else np.uint32).astype(np.uint64)
    key, first = before["key"] % oracle.WORD, halves * before["first_column"]
    keys = [oracle.mix64(key + first + c + 1) >> 32 | 1 for c in range(words.shape[1])]
    sums = (words * np.array(keys, np.uint64)).sum(1, dtype=np.uint64).tolist()
    of_rows = [oracle.mix64((i % oracle.WORD) ^ key) | 1 for i in ids]
    total = sum(k * s for k, s in zip(of_rows, sums, strict=True)) % oracle.WORD
    equal(result, whole(oracle.signed(total)))


# Rows


def draw_blocks(rng: random.Random) -> Arguments:
    """Returns `blocks`, `shift` and `columns` of one table."""
    shift, columns, dtype = a_shift(rng), a_width(rng), rng.choice(FLOATS)
    count = rng.randrange(4)
    blocks = [numbers_of(rng, (1 << shift, columns), dtype) for _ in range(count)]
    blocks = with_short_last(rng, blocks)
    if not blocks and rng.random() < 0.5:
        columns = rng.choice((2**20, 2**30, 2**31 - 1))
    return {"blocks": blocks, "shift": shift, "columns": columns}


def draw_rows(rng: random.Random, blocks: Arguments, lowest: int = 0) -> list[int]:
    """Returns rows inside the blocks."""
    capacity = sum(map(len, blocks["blocks"]))
    if capacity == 0 and (lowest == 0 or blocks["columns"] > 2**12):
        return []
    return [rng.randrange(lowest, capacity) for _ in range(size(rng, 800))]


def draw_raise_errors(rng: random.Random) -> Arguments:
    return {"like": torch.ones(rng.choice((0, 1, 7)))}


def check_raise_errors(before: Arguments, after: Arguments, _: None) -> None:
    equal(after["like"], before["like"])


def draw_advise_huge_pages(rng: random.Random) -> Arguments:
    return {"block": torch.ones(rng.choice((0, 1, 7, 2**19 + 3, 2**20)))}


def check_advise_huge_pages(before: Arguments, after: Arguments, _: None) -> None:
    equal(after["block"], before["block"])


def draw_grow_block(rng: random.Random) -> Arguments:
    """Half of the blocks are in a range already, of the same limit or a smaller one."""
    rows, columns = rng.choice((0, 1, 5, 600)), a_width(rng)
    limit = rows + rng.choice((1, 7, 5000))
    block = numbers_of(rng, (rows, columns), rng.choice(FLOATS))
    if rows and rng.random() < 0.5:
        block = ops.grow_block(block, rows, rng.randint(rows, limit))
    return {"block": block, "rows": rng.randint(max(1, rows), limit), "limit": limit}


def check_grow_block(before: Arguments, after: Arguments, result: Tensor) -> None:
    block, rows, limit = before["block"], before["rows"], before["limit"]
    need(block.dim() == 2 and block.shape[1] > 0, "a block [R, D]")
    need(max(1, len(block)) <= rows <= limit, "rows up to the limit")
    need(limit * block.shape[1] * block.element_size() <= 2**47, "a limit in bytes")
    assert result.shape == (rows, block.shape[1]) and result.dtype == block.dtype
    equal(result[: len(block)], block)
    result[-1:].view(torch.uint8).fill_(7)  # a fault, if its memory is not committed


def draw_init_rows_(rng: random.Random) -> Arguments:
    blocks = draw_blocks(rng)
    rows = [*dict.fromkeys(draw_rows(rng, blocks))]  # fresh rows: each once
    probabilities = sorted((rng.random(), rng.random())) if rng.random() < 0.5 else [0.0, 1.0]
    return {
        "ids": whole(*some_ids(rng, len(rows))),
        "rows": whole(*rows),
        **blocks,
        "first_column": rng.choice((0, 1, 3, 16, 40)),
        "kind": rng.randrange(3),
        "parameters": [
            -rng.random(),
            rng.random(),
            rng.random() - 0.5,
            rng.random(),
            *probabilities,
        ],
        "key": rng.randrange(-(2**63), 2**63),
    }


def check_init_rows_(before: Arguments, after: Arguments, _: None) -> None:
    ids, rows = numbers(before["ids"], "ids"), numbers(before["rows"], "rows")
    columns, first = before["columns"], before["first_column"]
    need(len(ids) == len(rows), "as many rows as ids")
    need(0 <= before["kind"] <= 2 and len(before["parameters"]) == 6, "kind and six parameters")
    low, high, mean, deviation, least, most = before["parameters"]
    need(before["kind"] != 2 or 0 <= least <= most <= 1, "a range of probabilities")
    table = rows_of_blocks(before["blocks"], before["shift"], columns)
    need(all(0 <= row < (0 if table is None else len(table)) for row in rows), "rows in the blocks")
    need(0 <= first < 2**31, "first_column >= 0")
    if table is None:
        return
    need(table.dtype in FLOATS, "rows of floats")
    if len({*rows}) < len(rows):
        raise Unjudged("a row of two ids")
    if first > 100 or not np.isfinite(before["parameters"]).all():
        raise Unjudged("not computed here")
    units = torch.from_numpy(oracle.initial_units(before["key"], ids, first + columns)[:, first:])
    values = torch.full_like(units, low)
    if before["kind"] == 1:
        values = low + units * (high - low)
    elif before["kind"] == 2:
        quantiles = torch.special.ndtri(least + units * (most - least))
        values = torch.minimum(mean + deviation * quantiles, torch.tensor(high).double())
        values = torch.maximum(values, torch.tensor(low).double())
    for row, value in zip(rows, values.float().to(table.dtype), strict=True):
        table[row] = value
    got = torch.cat([block.reshape(-1, columns) for block in after["blocks"]])
    if before["kind"] < 2:
        equal(got, table, "rows")
    else:
        close = 1e-2 if table.dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(got, table, rtol=close, atol=1e-5, equal_nan=True)


def draw_ask_for_rows(rng: random.Random) -> Arguments:
    blocks = draw_blocks(rng)
    return {"rows": whole(*draw_rows(rng, blocks, -1)), **blocks}


def check_ask_for_rows(before: Arguments, after: Arguments, _: None) -> None:
    rows, blocks = numbers(before["rows"], "rows"), before["blocks"]
    dtype = blocks[0].dtype if blocks else torch.float32
    need(dtype in FLOATS, "a float dtype")
    table = rows_of_blocks(blocks, before["shift"], before["columns"], dtype)
    need(
        all(-1 <= row < (0 if table is None else len(table)) for row in rows), "rows in the blocks"
    )
    for was, block in zip(blocks, after["blocks"], strict=True):
        equal(block, was)


def draw_gather_rows(rng: random.Random) -> Arguments:
    blocks = draw_blocks(rng)
    dtype = blocks["blocks"][0].dtype if blocks["blocks"] else rng.choice(FLOATS)
    return {"rows": whole(*draw_rows(rng, blocks, -1)), **blocks, "dtype": dtype}


def check_gather_rows(before: Arguments, _: Arguments, result: Tensor) -> None:
    rows, columns = numbers(before["rows"], "rows"), before["columns"]
    need(before["dtype"] in FLOATS, "a float dtype")
    table = rows_of_blocks(before["blocks"], before["shift"], columns, before["dtype"])
    need(
        all(-1 <= row < (0 if table is None else len(table)) for row in rows), "rows in the blocks"
    )
    expected = torch.zeros(len(rows), columns, dtype=before["dtype"])
    for place, row in enumerate(rows):
        if row >= 0:
            expected[place] = table[row]
    assert result.shape == expected.shape
    equal(result, expected)


def draw_scatter_rows_(rng: random.Random) -> Arguments:
    blocks = draw_blocks(rng)
    rows = draw_rows(rng, blocks)
    dtype = blocks["blocks"][0].dtype if blocks["blocks"] else torch.float32
    values = numbers_of(rng, (len(rows), blocks["columns"] if rows else 1), dtype)
    return {"rows": whole(*rows), "values": values, **blocks}


def check_scatter_rows_(before: Arguments, after: Arguments, _: None) -> None:
    rows, columns, values = numbers(before["rows"], "rows"), before["columns"], before["values"]
    table = rows_of_blocks(before["blocks"], before["shift"], columns)
    need(values.numel() == len(rows) * columns, "values of every row")
    need(all(0 <= row < (0 if table is None else len(table)) for row in rows), "rows in the blocks")
    if table is None:
        return
    need(table.dtype in FLOATS and values.dtype == table.dtype, "values of the blocks' dtype")
    for row, value in zip(rows, values.reshape(len(rows), columns), strict=True):
        table[row] = value
    equal(torch.cat([block.flatten() for block in after["blocks"]]), table, "blocks")


# Marks


def draw_words(rng: random.Random, make: Any) -> Arguments:
    """Returns `rows`, `table_offsets`, `blocks` and `layout` of tables that keep one word a row."""
    blocks: list[Tensor] = []
    layout, rows, offsets = [], [], [0]
    for _ in range(rng.randrange(4)):
        shift, count = a_shift(rng), rng.randrange(4)
        layout.append([len(blocks), count, shift, rng.choice((1, 1, 5))])
        own = with_short_last(rng, [make(1 << shift) for _ in range(count)])
        blocks += own
        capacity = sum(map(len, own))
        rows += [rng.randrange(-1, capacity) for _ in range(size(rng))]
        offsets.append(len(rows))
    return {
        "rows": whole(*rows),
        "table_offsets": whole(*offsets),
        "blocks": blocks,
        "layout": torch.tensor(layout, dtype=I64).reshape(-1, 4),
    }


def words_of_tables(blocks: list[Tensor], layout: Tensor, dtype: torch.dtype) -> list[list[int]]:
    words = []
    for table in read_layout(layout, len(blocks)):
        own = blocks[table.first : table.first + table.blocks]
        joined = rows_of_blocks(own, table.shift, 1, dtype)
        words.append([] if joined is None else joined.flatten().tolist())
    return words


def draw_mark_rows_(rng: random.Random) -> Arguments:
    drawn = draw_words(rng, lambda rows: torch.arange(rows, dtype=torch.int32).reshape(-1, 1))
    versions = [rng.choice((0, 5, 2**31 - 1)) for _ in range(len(drawn["layout"]))]
    drawn["marks"] = drawn.pop("blocks")
    return {**drawn, "versions": whole(*versions)}


def check_mark_rows_(before: Arguments, after: Arguments, _: None) -> None:
    rows = numbers(before["rows"], "rows")
    marks = words_of_tables(before["marks"], before["layout"], torch.int32)
    versions = numbers(before["versions"], "versions")
    offsets = check_offsets(before["table_offsets"], len(marks), len(rows))
    need(len(versions) == len(marks), "a version for each table")
    need(all(0 <= v < 2**31 for v in versions), "versions in [0, 2^31)")
    for table, version, a, b in zip(marks, versions, offsets, offsets[1:], strict=False):
        need(not table or all(row < len(table) for row in rows[a:b]), "rows of the table's marks")
        for row in rows[a:b]:
            if table and row >= 0:
                table[row] = version
    assert words_of_tables(after["marks"], before["layout"], torch.int32) == marks


def draw_mark_new_(rng: random.Random) -> Arguments:
    marks: list[Tensor] = []
    layout, rows, offsets = [], [], [0]
    for _ in range(rng.randrange(4)):
        shift, count = rng.randint(6, 8), rng.randrange(3)
        layout.append([len(marks), count, shift, rng.choice((1, 1, 5))])
        density = rng.choice((0, 255, rng.randrange(256)))
        marks += [
            torch.tensor([byte & density for byte in rng.randbytes(1 << shift)]).byte()
            for _ in range(count)
        ]
        most = rng.choice((8, count * 8 << shift)) if count else 9
        rows += [rng.randrange(-1, most) for _ in range(size(rng))]
        offsets.append(len(rows))
    return {
        "rows": whole(*rows),
        "table_offsets": whole(*offsets),
        "marks": marks,
        "layout": torch.tensor(layout, dtype=I64).reshape(-1, 4),
    }


def check_mark_new_(before: Arguments, after: Arguments, result: tuple[Tensor, Tensor]) -> None:
    rows, layout = numbers(before["rows"], "rows"), before["layout"]
    tables = bits_of_tables(before["marks"], layout)
    offsets = check_offsets(before["table_offsets"], len(tables), len(rows))
    places, begins, found = [], [0], 0
    for bits, a, b in zip(tables, offsets, offsets[1:], strict=False):
        need(not bits or all(row < len(bits) for row in rows[a:b]), "rows of the table's marks")
        was_set = list(bits)
        for place in range(a, b):
            row = rows[place]
            if bits and row >= 0:
                places += [] if bits[row] else [place]
                found += not was_set[row]
                bits[row] = 1
        begins.append(len(places))
    assert bits_of_tables(after["marks"], layout) == tables
    equal(result[0], whole(*places, *[-1] * (found - len(places))), "places")
    equal(result[1], whole(*begins), "begins")


register(globals())
