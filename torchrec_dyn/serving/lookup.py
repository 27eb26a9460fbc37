"""Looks up ids of several features in the served tables, in eager mode and in exported programs.

While a program is exported, no call reads a number out of a tensor: shapes follow from the sizes of the
inputs, so that torch.export can trace the whole call. A call reads the tables through one reference, which
`refresh` replaces.

Legend: T tables, F features (in table order), B bags of a feature, N ids, D columns of a table.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import INITIALIZERS, named_initializer
from torchrec_dyn.initializers import table_key
from torchrec_dyn.lookup import largest_of_bags
from torchrec_dyn.serving.generation import (
    ALL_ROWS,
    BLOCK_SHIFT,
    Generation,
    ServedTensors,
    name_in_index,
    open_generation,
)
from torchrec_dyn.serving.manifest import ServedTable
from torchrec_dyn.serving.row_format import INT4, NBitPooling

# Held for an assignment only.
_REPLACING = threading.Lock()


@torch.library.custom_op("torchrec_dyn_serving::initial_rows", mutates_args=())
def _initial_rows(
    ids: Tensor, columns: int, dtype: torch.dtype, kind: int, parameters: list[float], key: int
) -> Tensor:
    # The op of the core writes into a block of 2^shift rows, a size that torch.export cannot express.
    shift = max(0, (ids.numel() - 1).bit_length())
    block = torch.empty(1 << shift, columns, dtype=dtype, device="cpu")
    rows = torch.arange(ids.numel(), device="cpu")
    ops.init_rows_(ids, rows, [block], shift, columns, 0, kind, parameters, key)
    return block[: ids.numel()].float().clone()


@_initial_rows.register_fake
def _(ids, columns, dtype, kind, parameters, key):  # type: ignore[no-untyped-def]
    return ids.new_empty(ids.shape[0], columns, dtype=torch.float32)


def _unseen_rows(name: str, table: ServedTable) -> Callable[[Tensor], Tensor]:
    """Returns a function of ids [M] int64 to their initial rows [M, D] float32, the same as in training."""
    initializer = named_initializer(table.initializer)
    if initializer is None:
        raise ValueError(
            f"serving(table='{name}'): expected an initializer among {', '.join(INITIALIZERS)}, got "
            f"{table.initializer}. Serve it with unseen='zeros'."
        )
    kind, parameters = initializer.parameters()
    return partial(
        _initial_rows,
        columns=table.embedding_dim,
        dtype=getattr(torch, table.trained_as),
        kind=kind,
        parameters=parameters,
        key=table_key(table.seed, name, "initial row"),
    )


def _nbit_poolings(columns: Sequence[int]) -> nn.ModuleDict:
    types = {"int8": torch.int8, "int4": INT4}
    return nn.ModuleDict({name: NBitPooling(columns, dtype) for name, dtype in types.items()})


class ServedLookup(nn.Module):
    """The lookup of the features of a collection's T tables.

    Unseen ids have `unseen` rows: "zeros"
    or "initial". A copy, also an unpickled one, opens the directory as a new lookup does.
    """

    generation: Generation

    def __init__(
        self,
        folder: str | os.PathLike[str],
        configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
        unseen: str,
        where: str,
        verify: bool = False,
        is_weighted: bool = False,
    ) -> None:
        super().__init__()
        if unseen not in ("zeros", "initial"):
            raise ValueError(f'{where}.unseen: expected "zeros" or "initial", got {unseen!r}.')
        self.folder = Path(folder).absolute()  # the process may change its working directory
        self._configs = list(configs)
        self._where = where
        self._verify, self._is_weighted = verify, is_weighted
        table_of = [t for t, config in enumerate(configs) for _ in config.feature_names]
        self._columns = [config.embedding_dim for config in configs for _ in config.feature_names]
        self._features, self._width = len(table_of), sum(self._columns)
        means = [getattr(config, "pooling", None) == PoolingType.MEAN for config in configs]
        self._table_numbers, self._means = table_of, [means[t] for t in table_of]
        self._lay_out()
        self._nbit = _nbit_poolings(self._columns)
        self._one_by_one = nn.ModuleDict(
            {str(columns): _nbit_poolings([columns]) for columns in set(self._columns)}
        )
        self.serves_initial = unseen == "initial"
        self.given: ServedTensors | None = None  # read in place of the generation, if any
        self.refresh()

    def _lay_out(self) -> None:
        """Sets the tensors that follow from the tables and their features alone."""
        places = list(accumulate(self._columns, initial=0))
        features = range(self._features)
        firsts = accumulate((len(config.feature_names) for config in self._configs), initial=0)
        # A segment (csrc/lookup/bags.h) is `fixed` + `by_batch` * B.
        fixed = [[t, 0, 0, places[f], self._width] for f, t in enumerate(self._table_numbers)]
        self._fixed = torch.tensor(fixed, device="cpu")
        self._by_batch = torch.tensor([[0, f, 1, 0, 0] for f in features], device="cpu")
        self._first_feature = torch.tensor(list(firsts), device="cpu")
        self._is_sum = torch.tensor([not is_mean for is_mean in self._means], device="cpu")
        self._feature_of_column = torch.arange(self._features, device="cpu").repeat_interleave(
            torch.tensor(self._columns, device="cpu")
        )

    def refresh(self) -> bool:
        """Serves the current generation from the next call on; returns True if it is a new one."""
        names = [config.name for config in self._configs]
        while True:
            before = cast("Generation | None", self._modules.get("generation"))
            generation = open_generation(self.folder, names, before, self._verify)
            if generation is None:
                return False
            for config, table in zip(self._configs, generation.tables, strict=True):
                if config.embedding_dim != table.embedding_dim:
                    raise ValueError(
                        f"{self._where}(table='{config.name}'): expected embedding_dim "
                        f"{table.embedding_dim} as in {self.folder}, got {config.embedding_dim}."
                    )
                self._check_pooling(config, table)
                if self.serves_initial:
                    generation.unseen.append(_unseen_rows(config.name, table))
            with _REPLACING:
                if self._modules.get("generation") is before:  # else another thread has refreshed
                    self.generation = generation
                    return True

    def _check_pooling(
        self, config: EmbeddingBagConfig | EmbeddingConfig, table: ServedTable
    ) -> None:
        """Raises ValueError if bags of a table with max pooling have weights or another pooling."""
        pooling = getattr(config, "pooling", PoolingType.SUM)
        if table.pooling and (self._is_weighted or pooling != PoolingType.SUM):
            got = f"{pooling}, is_weighted={self._is_weighted}"
            raise ValueError(
                f"{self._where}(table='{config.name}'): expected pooling SUM and is_weighted=False, as in "
                f"training with pooling='max', got {got}. Serve the table in a collection of its own."
            )

    def tensor_names(self) -> list[str]:
        """Returns the names in the index of the tensors that `given_of` takes."""
        parts = "slots", "key", "rows"
        names = [name_in_index(config.name, part) for config in self._configs for part in parts]
        return [*names, ALL_ROWS] if self.generation.nbit else names

    def given_of(self, tensors: Mapping[str, Tensor]) -> ServedTensors:
        """Returns the tables that consist of tensors by the names of `tensor_names`."""
        maps, keys, rows = (
            [tensors[name_in_index(config.name, part)] for config in self._configs]
            for part in ("slots", "key", "rows")
        )
        lines = [[t, 1, BLOCK_SHIFT, one.embedding_dim] for t, one in enumerate(self._configs)]
        layout, nbit = torch.tensor(lines, device="cpu"), self.generation.nbit
        if nbit:
            return ServedTensors(maps, torch.cat(keys), tensors[ALL_ROWS], [], layout, nbit)
        # The file may have more rows of this width, of other tables.
        blocks = [one.narrow(0, 0, torch.sym_min(one.shape[0], 1 << BLOCK_SHIFT)) for one in rows]
        return ServedTensors(maps, torch.cat(keys), rows[0], blocks, layout, nbit)

    def pooled(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, batch: int) -> Tensor:
        """Returns the pooled rows of bags, [B, sum of D over features] float32; `batch` is B.

        ids [N] int64, feature after feature in table order; offsets [F * B + 1] int64, ascending from 0 to N;
        weights [N] float32 or None.
        """
        # Read once: refresh may replace it at any time.
        generation = self.generation
        served = self.given or generation.tensors()
        ids, weights = ids.contiguous(), None if weights is None else weights.contiguous()
        table_offsets = offsets[self._first_feature * batch]
        rows, absent = served.find(ids, table_offsets)
        if served.nbit:
            out = self._nbit[served.nbit](served.rows, rows, offsets, weights)
        else:
            segments = self._fixed + self._by_batch * batch
            out = ops.gather_pool(
                rows, offsets, weights, served.blocks, served.layout, segments,
                False, batch * self._width, torch.float32,
            ).view(batch, self._width)  # fmt: skip
        if self.serves_initial and self._has_any(absent):
            out = out + self._unseen_pooled(ids, rows, offsets, weights, batch)
        if any(self._means):
            lengths = offsets.diff().view(self._features, batch).t().clamp(min=1)
            out = out / torch.where(self._is_sum, 1, lengths)[:, self._feature_of_column]
        if any(table.pooling for table in generation.tables):
            out = self._with_largest(out, generation, served, ids, rows, offsets)
        return out

    def _with_largest(
        self,
        out: Tensor,
        generation: Generation,
        served: ServedTensors,
        ids: Tensor,
        rows: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """Returns the output [B, sum of D] with the largest values where a table has max pooling."""
        batch, parts = out.shape[0], [*out.split(self._columns, dim=1)]
        bounds = offsets[torch.arange(self._features + 1, device="cpu") * batch]
        counts = counts_between(bounds, ids)
        by_feature = zip(ids.split(counts), rows.split(counts), strict=True)
        for f, (feature_ids, feature_rows) in enumerate(by_feature):
            table = self._table_numbers[f]
            if not generation.tables[table].pooling:
                continue
            ends = torch.tensor([0, feature_rows.shape[0]], device="cpu")
            own = slice(table, table + 1)
            values = self._one_by_one_rows(served, own, feature_rows, ends)
            if self.serves_initial:
                initial = generation.unseen[table](feature_ids)
                values = torch.where(feature_rows.unsqueeze(1) < 0, initial, values)
            begins = offsets[f * batch : (f + 1) * batch + 1] - bounds[f]
            places = torch.arange(values.shape[0], device="cpu")
            parts[f], _ = largest_of_bags(values, places, begins)
        return torch.cat(parts, dim=1)

    def _one_by_one_rows(
        self, served: ServedTensors, tables: slice, rows: Tensor, table_offsets: Tensor
    ) -> Tensor:
        """Returns rows [N, D] float32 of some tables of one width, in their order; zeros for -1.

        table_offsets: the begin of each of them in rows [N] int64, and N.
        """
        columns = self._configs[tables][0].embedding_dim
        if served.nbit:
            by_type = cast(nn.ModuleDict, self._one_by_one[str(columns)])
            return cast(Tensor, by_type[served.nbit](served.rows, rows, None))
        begins, counts = table_offsets[:-1], table_offsets.diff()
        numbers = torch.arange(len(self._configs[tables]), device="cpu")
        widths = torch.full_like(numbers, columns)
        segments = torch.stack([numbers, begins, counts, begins * columns, widths], 1)
        return ops.gather_pool(
            rows, None, None, served.blocks, served.layout[tables], segments, False,
            rows.shape[0] * columns, torch.float32,
        ).view(-1, columns)  # fmt: skip

    def sequences(self, ids: Tensor, feature_offsets: Tensor) -> Tensor:
        """Returns the rows of ids, [N, D] float32; all tables have the same width.

        ids [N] int64, feature after feature in table order; feature_offsets [F + 1] int64, the begin of each
        feature in `ids`, and N.
        """
        served = self.given or self.generation.tensors()
        table_offsets = feature_offsets[self._first_feature]
        ids = ids.contiguous()
        rows, absent = served.find(ids, table_offsets)
        out = self._one_by_one_rows(served, slice(None), rows, table_offsets)
        if self.serves_initial and self._has_any(absent):
            absent_of = self._absent_positions(rows, table_offsets)
            initial = [
                self.generation.unseen[t](ids[positions]) for t, positions in enumerate(absent_of)
            ]
            out = out.index_copy(0, torch.cat(absent_of), torch.cat(initial))
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ServedLookup:
        # Every conversion of nn.Module (.to, .half, .to_empty, .share_memory) calls `_apply`. All tensors are
        # numbers for the CPU and mapped files: there is nothing to convert, and `to_empty` would lose them.
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Without the generation: a copy would hold all rows in memory of its own.
        modules = {name: child for name, child in self._modules.items() if name != "generation"}
        return {**self.__dict__, "_modules": modules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.refresh()

    def __prepare_scriptable__(self) -> NoReturn:
        """Raises ValueError: torch.jit.script calls it for each module of a model."""
        self._refuse("torch.jit.script")

    def check_call(self, ids: Tensor) -> None:
        """Raises ValueError for ids on a GPU, and in torch.jit.trace: it would record its bags."""
        if torch.jit.is_tracing():
            self._refuse("torch.jit.trace")
        if not ids.is_cpu:
            raise ValueError(
                f"{self._where}: expected features on the CPU, where the served rows are, got {ids.device}. "
                'Call features.to("cpu") before, and move the output.'
            )

    def _refuse(self, exporter: str) -> NoReturn:
        raise ValueError(
            f"{self._where}: expected a call, torch.export or torch.compile, got {exporter}. Use "
            "serving.export_program or torch.export.export, and for programs without Python "
            "serving.compile_program."
        )

    @staticmethod
    def _has_any(absent: Tensor) -> bool:
        # An exported program cannot branch on `absent`, so it always reads initial rows.
        return torch.compiler.is_exporting() or bool(absent.any())

    @staticmethod
    def _absent_positions(rows: Tensor, bounds: Tensor) -> list[Tensor]:
        """Returns the positions of absent ids in each part; part i is bounds[i] to bounds[i + 1]."""
        absent = (rows < 0).nonzero().view(-1)
        return list(absent.split(counts_between(torch.searchsorted(absent, bounds), absent)))

    def _unseen_pooled(
        self, ids: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None, batch: int
    ) -> Tensor:
        """Returns the summed initial rows of absent ids; ids with a row count as zeros."""
        every_feature = torch.arange(self._features + 1, device="cpu") * batch
        parts = []
        for f, positions in enumerate(self._absent_positions(rows, offsets[every_feature])):
            table = self._table_numbers[f]
            values = self.generation.unseen[table](ids[positions])
            bags = torch.bucketize(positions, offsets[1:], right=True)
            if weights is not None:
                values = values * weights[positions, None]
            zeros = values.new_zeros(batch, self._columns[f])
            parts.append(zeros.index_add(0, bags - f * batch, values))
        return torch.cat(parts, 1)


def begins_of(sizes: Sequence[int]) -> Tensor:
    """Returns the first bag of each feature, and the end of the last, [F + 1] int64, of sizes [F]."""
    if torch.compiler.is_exporting():  # all sizes are one, which is no number yet
        return torch.arange(len(sizes) + 1, device="cpu") * sizes[0]
    return torch.tensor([*accumulate(sizes, initial=0)], device="cpu")


def counts_between(bounds: Tensor, ids: Tensor) -> list[int]:
    """Returns the number of ids of each feature, as sizes whose values are known when the program runs.

    bounds: [F + 1] int64, the begin of each feature in ids [N] int64, and N.
    """
    if not torch.compiler.is_exporting():
        return cast(list[int], bounds.diff().tolist())
    counts = [
        cast(int, count.item()) for count in bounds.diff().unbind()
    ]  # int() would fix the sizes
    for count in counts:
        torch._check(count >= 0)
    torch._check(sum(counts) == ids.shape[0])
    return counts
