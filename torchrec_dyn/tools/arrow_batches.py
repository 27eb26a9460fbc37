"""Columns of Arrow from tensors of a table, and batches of them. Numbers are not copied, but bfloat16.

Arrow has no bfloat16: such rows become float32, which is exact.

Legend: M rows of a batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import RowSource
from torchrec_dyn.life import Clock
from torchrec_dyn.optimizers import STATE_NAMES

_FORMAT = "torchrec_dyn_table_1"
_TENSORS = {"id": "ids", "row": "weight", "last_seen_time": "last_seen"}  # by column
_NUMBERS = ("id", "last_seen", "last_seen_time", "count")  # one int64 a row
WAITING = ("id", "last_seen", "count")
_DEFAULT = ("id", "row", "last_seen", "count")


def pyarrow(call: str) -> Any:
    """Returns the package pyarrow.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            f"{call}: expected the package pyarrow, got none. Run `pip install 'pyarrow>=15'`."
        ) from error
    return pyarrow


class ArrowColumns:
    """The columns that are read of one table.

    `columns` are their names; None: id, row, last_seen and count, as far as the table has them. With
    `waiting` they are of the waiting ids in place of the rows.

    Attributes:
        schema: the schema of Arrow; its metadata tell table, seed and step.
        tensors: names of the tensors by row that the columns need.

    Raises:
        ValueError: if the table has no such column.
        ImportError: if pyarrow is not installed.
    """

    def __init__(
        self, source: RowSource, columns: Sequence[str] | None, waiting: bool, call: str
    ) -> None:
        arrow = self._arrow = pyarrow(call)
        known = WAITING if waiting else _known(source)
        if columns is None:
            columns = [name for name in _DEFAULT if name in known]
        unknown = [name for name in columns if name not in known]
        if unknown or not columns or len(set(columns)) < len(columns):
            raise ValueError(
                f"{source.where}: expected distinct columns among {', '.join(known)}, got "
                f"{', '.join(columns) or 'none'}."
            )
        self._columns = tuple(columns)
        self.tensors = tuple(dict.fromkeys(_TENSORS.get(name, name) for name in columns))
        self._clock = source.clock() if "last_seen_time" in columns else None
        fields = [arrow.field(name, self._type_of(source, name), False) for name in columns]
        facts = source.facts
        told = {"format": _FORMAT, "table": facts.name, "seed": facts.seed, "step": facts.step}
        self.schema = arrow.schema(fields, metadata={"torchrec_dyn": json.dumps(told)})

    def _type_of(self, source: RowSource, name: str) -> Any:
        if name in _NUMBERS:
            return self._arrow.int64()
        is_half = name == "row" and source.facts.dtype == torch.float16
        number = self._arrow.float16() if is_half else self._arrow.float32()
        width = source.columns_of(_TENSORS.get(name, name))
        if width == 1 and name in STATE_NAMES:
            return number
        return self._arrow.list_(self._arrow.field("item", number, False), width)

    def batch(self, rows: Mapping[str, Tensor]) -> Any:
        """Returns a RecordBatch of Arrow of the rows of each tensor by name, rows [M, columns] or [M]."""
        made = []
        for field in self.schema:
            values = rows[_TENSORS.get(field.name, field.name)]
            if field.name == "last_seen_time":
                assert self._clock is not None
                values = Clock.load(self._clock).times_of(values)
            made.append(self._array(values, field.type))
        return self._arrow.RecordBatch.from_arrays(made, schema=self.schema)

    def _array(self, values: Tensor, kind: Any) -> Any:
        arrow = self._arrow
        if values.dtype == torch.bfloat16:
            values = values.float()
        numbers = arrow.py_buffer(values.contiguous().numpy())
        is_list = arrow.types.is_fixed_size_list(kind)
        flat = arrow.Array.from_buffers(
            kind.value_type if is_list else kind, values.numel(), [None, numbers]
        )
        return arrow.FixedSizeListArray.from_arrays(flat, type=kind) if is_list else flat


def _known(source: RowSource) -> tuple[str, ...]:
    """Returns the names of the columns that a table has."""
    by_tensor = {tensor: column for column, tensor in _TENSORS.items() if column in _DEFAULT}
    names = [by_tensor.get(name, name) for name in source.names]
    return tuple(names + ["last_seen_time"] * ("last_seen" in names and source.clock().numel() > 0))


class Gathered:
    """Joins parts of rows to batches of a size, so that a range of few ids makes no small batches.

    Args:
        most: most bytes of a batch; a part that has more is a batch by itself.
    """

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._parts: list[Mapping[str, Tensor]] = []

    def add(self, rows: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Adds rows, and yields a batch if what is held is one without them.

        Args:
            rows: the rows of each tensor by name, [M, columns] or [M].
        """
        size = sum(one.nbytes for one in rows.values())
        if self._parts and self._held + size > self._most:
            yield from self.rest()
        if len(rows["ids"]):
            self._parts.append(rows)
            self._held += size

    def rest(self) -> Iterator[dict[str, Tensor]]:
        """Yields what is held, if anything."""
        parts, self._parts, self._held = self._parts, [], 0
        if len(parts) == 1:
            yield dict(parts[0])
        elif parts:
            yield {name: torch.cat([one[name] for one in parts]) for name in parts[0]}
