"""DynamicTable: one table, or one column shard of it, on this rank.

It joins an id map (id -> row), a store of weights and of each optimizer state (row -> numbers) and
the numbering of rows. What happens in a step is in lookup.py.

Legend: R rows in use, M ids asked for, D columns here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.id_map import IdMap
from torchrec_dyn.initializers import Initializer, default_initializer, table_key
from torchrec_dyn.insertion import insert_unseen
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.row_numbers import OutstandingForwards, RowNumbers
from torchrec_dyn.row_store import RowStore, block_shift
from torchrec_dyn.table_checks import check_ids, check_room, check_rows, check_shape, check_state
from torchrec_dyn.table_state import NamedState, named_states, read_state


class DynamicTable:
    """A table whose rows are made when ids are first seen.

    Attributes:
        name: the table's name, part of what decides its initial rows.
        num_embeddings: limit on the rows of the whole table.
        embedding_dim: width of a whole row.
        first_column: number of the first column held here.
        columns: columns held here.
        row_limit: limit on the rows held here.
        optimizer: how rows learn.
        step: training forwards so far.
        generation: counts replacements of the whole contents; a forward of an older one cannot
            run its backward.
    """

    def __init__(
        self,
        *,
        name: str,
        num_embeddings: int,
        embedding_dim: int,
        optimizer: RowOptimizer,
        config: DynamicTableConfig,
        first_column: int = 0,
        columns: int | None = None,
        row_limit: int | None = None,
        dtype: torch.dtype = torch.float32,
        initializer: Initializer | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.first_column = first_column
        self.columns = embedding_dim if columns is None else columns
        self.row_limit = num_embeddings if row_limit is None else row_limit
        self.optimizer = optimizer
        self.config = config
        self.step = 0
        self.generation = 0
        self.counters = dict.fromkeys(("ids_seen", "hits", "inserted", "erased", "late_grads"), 0)
        check_shape(self, dtype, torch.device(device))
        self.initializer = config.initializer or initializer or default_initializer(num_embeddings)
        self._initial_key = table_key(config.seed, name, "initial row")
        self.rounding_key = table_key(config.seed, name, "rounding")
        self.forwards = OutstandingForwards()
        self._reset(dtype, torch.device(device))

    def _reset(self, dtype: torch.dtype, device: torch.device) -> None:
        shift = block_shift(self.row_limit, self.columns * dtype.itemsize)
        self.id_map = IdMap()
        self.row_numbers = RowNumbers(self.forwards)
        self.weights = RowStore(self.columns, shift, dtype, device)
        self.states = tuple(
            RowStore(columns, shift, torch.float32, device)
            for columns in self.optimizer.state_columns(self.columns)
        )
        self.generation += 1

    @property
    def where(self) -> str:
        """The table, for messages."""
        return f"DynamicTable({self.name!r})"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.weights.device

    @property
    def num_rows(self) -> int:
        """Ids that have a row."""
        return self.id_map.num_ids

    @property
    def stores(self) -> tuple[RowStore, ...]:
        """The weights and every optimizer state."""
        return (self.weights, *self.states)

    def check_room(self, additional: int) -> None:
        """Raises RuntimeError if `additional` more rows exceed the limit; changes nothing."""
        check_room(self, additional)

    def reserve(self, additional: int) -> None:
        """Makes room for `additional` more ids and rows; the contents stay as they are."""
        self.id_map.reserve(additional)
        rows = self.row_numbers.highest_after(additional)
        for store in self.stores:
            store.reserve(rows)

    def init_rows(self, ids: Tensor, rows: Tensor, store: RowStore | None = None) -> None:
        """Writes the initial rows of ids.

        Args:
            ids: [M] int64.
            rows: [M] int64.
            store: where to; None is the table itself, whose optimizer state is zeroed too.
        """
        weights = store or self.weights
        kind, parameters = self.initializer.parameters()
        ops.init_rows_(
            ids, rows, weights.blocks, weights.shift, self.columns, self.first_column,
            kind, parameters, self._initial_key,
        )  # fmt: skip
        if store is None:
            for state in self.states:
                state.zero(rows)

    def find_or_insert(self, ids: Tensor) -> Tensor:
        """Gives every id a row.

        Args:
            ids: [M] int64, repeats allowed.

        Returns:
            [M] int64 rows.
        """
        offsets = torch.tensor([0, ids.numel()])
        rows, _ = ops.lookup(ids, offsets, *self.id_map.arrays())
        insert_unseen([self], ids, rows, offsets)
        return rows

    def adopt(self, new_ids: Tensor) -> Tensor:
        """Takes and initialises a row for each of new_ids, which the caller writes into the map.

        Args:
            new_ids: [M] int64, distinct and absent; room was reserved.

        Returns:
            [M] int64 rows.
        """
        rows = self.row_numbers.take(new_ids.numel())
        self.init_rows(new_ids, rows)
        self.id_map.num_ids += new_ids.numel()
        self.counters["inserted"] += new_ids.numel()
        return rows

    def ids(self) -> Tensor:
        """Returns the ids that have a row in canonical order (by mixed id, unsigned), [R] int64."""
        return self.id_map.contents()[0]

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id and changes nothing.

        Args:
            ids: [M] int64.

        Returns:
            rows: [M, D] in the table's dtype, zeros for an id without a row.
            found: [M] bool.
        """
        rows = self.id_map.lookup(check_ids(f"{self.where}.lookup", ids))
        return self.weights.read(rows), rows >= 0

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id; an absent id is inserted with fresh optimizer state.

        Args:
            ids: [M] int64; of a repeated id the last row stays.
            rows: [M, D] floating point, converted to the table's dtype.
        """
        ids = check_ids(f"{self.where}.assign", ids)
        check_rows(self, rows, ids.numel(), "assign")
        self.weights.write(self.find_or_insert(ids), rows.detach())

    def erase(self, ids: Tensor) -> int:
        """Lets ids go; their rows are reused once no open forward can hold them.

        Args:
            ids: [M] int64; absent ones are ignored.

        Returns:
            How many had a row.
        """
        rows = self.id_map.erase(check_ids(f"{self.where}.erase", ids))
        self.row_numbers.give_back(rows)
        self.counters["erased"] += rows.numel()
        return rows.numel()

    def stats(self) -> dict[str, int | float]:
        """Returns what the table holds and what happened to it since it was made.

        rows, limit, slots, load (rows / slots), bytes (slots and rows in use with their optimizer
        state), step, withheld (rows that wait for a forward), probe_length_mean and _max, and the
        counts ids_seen, hits, inserted, erased, late_grads (to rows whose id had left).
        """
        row_bytes = sum(store.row_bytes for store in self.stores)
        return {
            "rows": self.num_rows,
            "limit": self.row_limit,
            "bytes": self.id_map.bytes + self.row_numbers.high * row_bytes,
            "step": self.step,
            "withheld": self.row_numbers.withheld().numel(),
            **self.id_map.stats(),
            **self.counters,
        }

    def export_state(self) -> dict[str, Tensor]:
        """Returns a copy of the contents in canonical order.

        "ids" [R] int64, "weight" [R, D], each optimizer state [R, D] or [R] float32, "step" [].
        """
        state = read_state(self.id_map, self.weights, self._named_states())
        return {**state, "step": torch.tensor(self.step)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the contents; whatever the limit, no row is dropped. Checks before any change.

        Args:
            state: as `export_state` gives it, in any order of ids; optimizer state and step may be
                missing (then fresh).
        """
        check_state(f"{self.where}.load_state", state, self.columns, self._named_states())
        self._replace(state, self.dtype, self.device)

    def _replace(
        self, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        before = dict(self.__dict__)  # what follows makes new objects and changes none of these
        try:
            self._fill(state, dtype, device)
        except BaseException:  # out of memory, mostly
            self.__dict__.update(before)
            raise

    def _fill(self, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._reset(dtype, device)
        ids, weight = state["ids"].contiguous(), state["weight"]
        self.step = int(state["step"]) if "step" in state else 0
        self.reserve(ids.numel())
        rows = self.row_numbers.take(ids.numel())
        ops.insert(ids, rows, torch.tensor([0, ids.numel()]), *self.id_map.arrays())
        self.id_map.num_ids = ids.numel()
        self.weights.write(rows, weight)
        for one in self._named_states():
            if one.name in state:
                one.store.write(rows, state[one.name].reshape(ids.numel(), one.store.columns))
            else:
                one.store.zero(rows)

    def _named_states(self) -> list[NamedState]:
        return named_states(self.optimizer, self.states)

    def convert(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        """Changes the rows' dtype or device; ids and optimizer state stay."""
        dtype, device = dtype or self.dtype, torch.device(device or self.device)
        if dtype == self.dtype and device == self.device:
            return
        check_shape(self, dtype, device)
        self._replace(self.export_state(), dtype, device)

    def __getstate__(self) -> dict[str, Any]:
        # Blocks are reserved far beyond the rows in use: a copy carries the contents.
        left_out = ("id_map", "row_numbers", "weights", "states", "forwards")
        fields = {name: value for name, value in self.__dict__.items() if name not in left_out}
        state = self.export_state()
        return {"fields": fields, "dtype": self.dtype, "device": self.device, "state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["fields"])
        self.counters = dict(self.counters)
        self.forwards = OutstandingForwards()  # graphs are no part of a copy
        self._fill(state["state"], state["dtype"], state["device"])
