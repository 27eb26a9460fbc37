"""The optimizer state of a local table, as entries of a KeyedOptimizer's state.

KeyedOptimizer asks each entry for `state_dict()` and hands it to `load_state_dict(...)`: so nothing
is exported until somebody saves.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.local_table import LocalTable
from torchrec_dyn.saved_life import LIFE, NOT_BY_ROW


class SavedState:
    """One state tensor of one table, read and written in the canonical order of its rows.

    Args:
        table: the table.
        name: "momentum1", "momentum2", "step" or what `RowLife.export` names.
    """

    def __init__(self, table: LocalTable, name: str) -> None:
        self._table = table
        self._name = name

    def state_dict(self) -> Tensor:
        """Exports the tensor: one of `DynamicTable.export_state`."""
        return self._table.rows().export_state()[self._name]

    def load_state_dict(self, saved: Tensor) -> None:
        """Puts a saved tensor in place of this one.

        Raises:
            ValueError: if it was saved for other rows than the table has now.
        """
        state = self._table.rows().export_state()
        if self._name not in NOT_BY_ROW and saved.shape != state[self._name].shape:
            raise ValueError(
                f"{self._table.where}: expected saved {self._name} "
                f"{list(state[self._name].shape)}, "
                f"got {list(saved.shape)}. Load the state dict of the module before that of its "
                "optimizer."
            )
        state[self._name] = saved.detach().to(state[self._name].dtype)
        if self._name == "step":
            # Scores are of steps up to theirs: they come next, or start afresh.
            state = {name: one for name, one in state.items() if name not in LIFE}
        self._table.rows().load_state(state)


def saved_states(table: LocalTable) -> dict[str, SavedState]:
    """Gives one entry per state tensor of the table, keyed "{table}.momentum1" as TorchRec does."""
    names = [name for name in table.rows().export_state() if name not in ("ids", "weight")]
    return {f"{table.config.name}.{name}": SavedState(table, name) for name in names}
