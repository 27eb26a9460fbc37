"""One table of an unsharded collection: a placeholder parameter, and the rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from torchrec_dyn.checkpoint_format import MODEL_CHECKSUM, MODEL_NAMES, table_config
from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules.optimizer_choice import chosen_optimizer
from torchrec_dyn.modules.table_configs import initializer_of, row_dtype, with_row_dtype
from torchrec_dyn.modules.wrapper_checks import (
    check_not_for_inference,
    refuses_quantization,
    skip_in_ddp,
    skipped_by_fully_shard,
)
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict import (
    TableLoad,
    are_rows_left_out,
    check_is_not_static,
    load_optimizer_state,
    save_optimizer_states,
    save_tables,
    stage_table,
)
from torchrec_dyn.storage import TABLES, TableLock, commit, lasting, locked, turn_of
from torchrec_dyn.table import ROW_DTYPES, TableShard, copy_rows

_META = torch.device("meta")
CHOICES = ("_optimizer_classes", "_optimizer_kwargs")  # attributes of a weight, by TorchRec
_NO_CHOICE: list[Any] = []


def marks_of(weight: Tensor) -> tuple[list[Any], list[Any]]:
    """Returns the choice of an optimizer that TorchRec has written on a weight."""
    marks = vars(weight)
    return marks.get(CHOICES[0], _NO_CHOICE), marks.get(CHOICES[1], _NO_CHOICE)


@refuses_quantization
@skipped_by_fully_shard
class UnshardedTable(nn.Module):
    """Holds the rows of one table in this process, and a placeholder parameter `weight`.

    `weight` is a meta tensor [num_embeddings, embedding_dim]: planners read its shape and
    `apply_optimizer_in_backward` marks it; the table is frozen if it requires no gradient. The rows are a
    TableShard, created at first use, when their optimizer is known. On the device meta there are none.
    """

    def __init__(
        self,
        config: EmbeddingBagConfig | EmbeddingConfig,
        dynamic: DynamicTableConfig,
        fused_params: Mapping[str, Any] | None,
        device: torch.device,
        where: str,
    ) -> None:
        super().__init__()
        self.config = config
        self.dynamic = dynamic
        self.fused_params = fused_params
        self.device = device
        self.where = f"{where}(table='{config.name}')"
        self.lock = TableLock()  # of its rows too; the tables of a collection share one lock
        self.shard: TableShard | None = None  # made at the first use
        self._choice: object = None
        shape = (config.num_embeddings, config.embedding_dim)
        self.weight: nn.Parameter = _placeholder(shape, row_dtype(config), True, [], [])
        # Called for its ValueError: wrong fused_params are an error now, not in training.
        chosen_optimizer(self.weight, fused_params, self.where)

    # The rows.

    def rows(self) -> TableShard:
        """Returns the rows, created at first use; another choice of optimizer since keeps them."""
        # Called for each table whenever one has changed. So it avoids nn.Module's attribute lookup, and
        # compares without a copy.
        weight = self._parameters["weight"]
        assert weight is not None
        if not weight.is_meta:
            raise ValueError(
                f"{self.where}: expected the placeholder of the rows on the meta device, got a tensor on "
                f"{weight.device}: functional_call cannot replace rows. Leave the weight out of the call, "
                "and edit rows with `assign`."
            )
        choice, table = marks_of(weight), self.shard
        if table is None or choice != self._choice:
            table = self._rows_for(choice)
        if table.is_frozen == weight.requires_grad:
            table.is_frozen = not weight.requires_grad
        return table

    @locked
    def _rows_for(self, choice: tuple[list[Any], list[Any]]) -> TableShard:
        """Returns rows with the optimizer chosen now, and with the contents of those before, if any."""
        before = self.shard
        if before is not None and choice == self._choice:
            return before
        if self.device == _META:
            raise ValueError(
                f"{self.where}: expected rows on a real device, got meta. "
                "Shard the collection, or call .to_empty(device=...) first."
            )
        optimizer = chosen_optimizer(self.weight, self.fused_params, self.where)
        if before is not None and before.optimizer.saved_name == optimizer.saved_name:
            rows = before
            if before.optimizer != optimizer:
                with commit(before):
                    before.change_optimizer(optimizer)
        else:
            rows = self._new_rows(optimizer, self.device)
            if before is not None:
                _copy_contents(before, rows)
        self.shard = rows
        self.device = rows.device  # with the number of the GPU, which its name may lack
        self._choice = (list(choice[0]), [dict(options) for options in choice[1]])
        return rows

    @property
    def is_frozen(self) -> bool:
        """True if the table is frozen: training reads it as evaluation does."""
        weight = self._parameters["weight"]
        return weight is not None and not weight.requires_grad

    def _new_rows(self, optimizer: RowOptimizer, device: torch.device) -> TableShard:
        table = TableShard(
            name=self.config.name,
            num_embeddings=self.config.num_embeddings,
            embedding_dim=self.config.embedding_dim,
            optimizer=optimizer,
            config=self.dynamic,
            dtype=self.weight.dtype,
            initializer=initializer_of(self.config, self.dynamic),
            device=device,
        )
        table.lock = self.lock
        return table

    @locked
    def drop_rows(self) -> None:
        """Drops all rows: the table is empty, as if new."""
        self.shard = None
        TABLES.renew()  # groups look at the table again

    # The placeholder.

    def mark_optimizer(self, classes: list[Any], kwargs: list[dict[str, Any]]) -> None:
        """Sets the attributes that `apply_optimizer_in_backward` sets, without its hook."""
        _mark(self.weight, classes, kwargs)

    def copy_marks(self, weight: nn.Parameter) -> None:
        """Copies optimizer marks and `requires_grad` from the placeholder of another table."""
        self.weight.requires_grad_(weight.requires_grad)
        if hasattr(weight, CHOICES[0]):
            _mark(self.weight, *(getattr(weight, name) for name in CHOICES))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the table; DistributedDataParallel's constructor skips its placeholder, inference raises."""
        check_not_for_inference(self)
        skip_in_ddp(self.where, f"{prefix}.weight" if prefix else "weight", self.weight)
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def apply(self, fn: Callable[[nn.Module], None]) -> UnshardedTable:
        """Applies a function that initialises modules, and hides the placeholder from it.

        DistributedModelParallel calls `apply` to allocate storage for meta parameters that are not sharded.
        """
        weight = self._parameters.pop("weight")
        try:
            fn(self)
        finally:
            self._parameters["weight"] = weight
        return self

    @locked
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> UnshardedTable:
        # Every conversion of nn.Module (.to, .half, .cpu, .to_empty) calls `_apply`. `fn` gets an empty
        # tensor, and the rows get the dtype and device of its result.
        probe = torch.empty(0, dtype=self.weight.dtype, device=self.device)
        try:
            converted = fn(probe)
        except NotImplementedError:
            # .to(device) raises for a meta tensor, because it has no data to copy. A table on the meta device
            # has no rows, so it can be moved.
            converted = fn(torch.empty(0, dtype=self.weight.dtype, device="cpu"))
        dtype, device = converted.dtype, converted.device
        if dtype not in ROW_DTYPES:
            raise ValueError(
                f"{self.where}: expected rows of float32, float16 or bfloat16, got {dtype}."
            )
        if self.shard is not None:
            if device == _META and self.shard.num_rows:
                raise ValueError(
                    f"{self.where}: expected a real device, got meta, where its "
                    f"{self.shard.num_rows} rows would be lost. "
                    "Call the collection's reset_parameters() first to drop them."
                )
            if device == _META:
                self.drop_rows()
            elif (dtype, device) != (self.shard.dtype, self.device):
                with self.lock.streams.turn(device):  # later calls wait until the rows are there
                    self.shard.convert(dtype=dtype, device=device)
        self.device = device
        if dtype != self.weight.dtype:
            self.weight.data = _placeholder(tuple(self.weight.shape), dtype, False, [], []).data
            self.config = with_row_dtype(self.config, dtype)
        return self

    # Saving, loading, copying.

    def saved_config(self) -> dict[str, Any]:
        """Returns the description of the table that checkpoints contain."""
        config = self.config
        initializer = self.shard.initializer if self.shard else initializer_of(config, self.dynamic)
        return table_config(
            config.name, config.embedding_dim, self.dynamic.seed, self.weight.dtype, initializer,
            self.dynamic.saved,
        )  # fmt: skip

    def as_table(self) -> Table:
        """Returns the present table as a `Table` of one rank; creates the rows."""
        return Table.of_one(self.rows(), self.where, self.saved_config())

    def _as_saved(self) -> Table:
        """Returns the table as it is: without rows if nothing has used it, even on the meta device."""
        rows = self.shard or self._new_rows(RowOptimizer(), torch.device("cpu"))
        return Table.of_one(rows, self.where, self.saved_config())

    def handle(self) -> Table:
        """Returns the handle for users: it creates rows at first use, and always reads the present ones."""
        return replace(
            self._as_saved(),
            shards=_PresentRows(self),
            device=self.device,
            optimizer=chosen_optimizer(self.weight, self.fused_params, self.where),
            features=tuple(self.config.feature_names),
            placeholder=self.weight,
        )

    @not_compiled
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        with turn_of(self, also_torn=True):
            save_tables(destination, {prefix: self._as_saved()}, self.where)
            checksum = destination.get(f"{prefix}{MODEL_CHECKSUM}")  # none within a restore
            if self.config.name in self.lock.torn and checksum is not None:
                # Places of a load. What saves these tensors saves rows that no load takes.
                checksum.fill_(-1)

    def save_state(self) -> Mapping[str, Tensor]:
        """Returns the optimizer state by key."""
        with turn_of(self, also_torn=True):  # all tensors at one moment, or the places of a load
            return save_optimizer_states([self.as_table()], f"{self.where}.state_dict")

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Loads the optimizer state by name."""
        with turn_of(self):
            load_optimizer_state(self.as_table(), saved)

    def staged(self, state_dict: Mapping[str, Any], prefix: str) -> TableLoad | None:
        """Returns the verified load of the saved rows, or None if the state dict has no rows."""
        check_is_not_static(prefix, state_dict, f"{self.where}.load_state_dict")
        saved = {
            name: state_dict[prefix + name]
            for name in MODEL_NAMES
            if isinstance(state_dict.get(prefix + name), Tensor)
        }
        return stage_table(self.as_table(), saved) if {"weight", "ids"} <= saved.keys() else None

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        *lists: list[str],
    ) -> None:
        missing_keys, unexpected_keys, error_msgs = lists
        if are_rows_left_out():
            return
        if strict:
            needed = [prefix + name for name in ("weight", "ids")]
            missing_keys.extend(key for key in needed if key not in state_dict)
            unexpected_keys.extend(
                key
                for key in state_dict
                if key.startswith(prefix) and key[len(prefix) :] not in MODEL_NAMES
            )
        loaded = state_dict.get(prefix + "weight")  # staged by the collection, if it is loaded
        with turn_of(self, also_torn=True):
            try:
                if not isinstance(loaded, TableLoad):
                    loaded = self.staged(state_dict, prefix)
            except ValueError as fault:
                error_msgs.append(str(fault))
                return
            if loaded is not None:
                loaded.commit()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.shard is not None:
            self.device = self.shard.device  # `torch.load(map_location=)` may have moved the rows

    def extra_repr(self) -> str:
        """Returns the sizes and the number of rows in use, for the printed model."""
        rows = 0 if self.shard is None else self.shard.id_map.num_ids  # of a torn table, too
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}, rows={rows}"


class _PresentRows(Sequence[TableShard]):
    """The only shard of an unsharded table, as it is when it is read."""

    def __init__(self, table: UnshardedTable) -> None:
        self.shard = table

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return [self.shard.rows()][index]


def _copy_contents(before: TableShard, table: TableShard) -> None:
    """Gives a new table the contents of one with another kind of optimizer, without optimizer state."""
    table.start_as(before.initializer)  # a loaded checkpoint may have set it
    with turn_of(table):
        copy_rows(before, table, with_optimizer=False)
    if before.changes is not None:
        table.changes = before.changes  # earlier markers stay valid
        table.note_replaced(before.id_map)
    before.generation += 1  # the backward of an earlier forward would update rows that are gone


class _Placeholder(nn.Parameter):
    """The parameter `weight` of a table. Copies of those that hold it, too, as optimizers, have the copy's.

    Other parameters lose their attributes when they are deep-copied, and cannot be pickled with the
    optimizers that apply_optimizer_in_backward sets on them. Groups are told when the table is frozen or
    marked.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_told = name == "requires_grad" or name in CHOICES
        if is_told:
            TABLES.renew()
        super().__setattr__(name, value)
        if is_told:
            TABLES.renew()  # a thread may have looked at it in between

    def requires_grad_(self, requires_grad: bool = True) -> _Placeholder:
        """Freezes the table, or trains it."""
        self.requires_grad = requires_grad
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        form = tuple(self.shape), self.dtype, self.requires_grad
        return _placeholder, (*form, *marks_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Placeholder:
        make, arguments = self.__reduce_ex__(4)
        placeholder: _Placeholder = make(*copy.deepcopy(arguments, memo))
        return placeholder


@lasting
def _placeholder(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    classes: list[Any],
    kwargs: list[dict[str, Any]],
) -> _Placeholder:
    data = torch.empty(shape, dtype=dtype, device=_META)
    placeholder = _Placeholder(data, requires_grad=requires_grad)
    if classes:
        _mark(placeholder, classes, kwargs)
    return placeholder


def _mark(weight: Any, classes: list[Any], kwargs: list[dict[str, Any]]) -> None:
    weight._in_backward_optimizers = []
    weight._optimizer_classes = list(classes)
    weight._optimizer_kwargs = [dict(options) for options in kwargs]


# torch.distributed.checkpoint.state_dict needs an attribute for each key of a state dict; it reads no value.
for _name in set(MODEL_NAMES) - {"weight", "config"}:
    setattr(UnshardedTable, _name, None)
