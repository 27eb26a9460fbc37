"""Writes the `.stats()` of every dynamic table of a model to a logger, in one call or in a hook.

A logger is a dict, or an object with the method `add_scalar` of TensorBoard's `SummaryWriter`. For a
sharded model each rank writes the stats of its own shards, without communication, to a logger of its own.
With `totals=True` the stats are those of whole tables: one rank writes them, and all ranks take part.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchrec_dyn.checkpoint_format import naming
from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.whole_model.by_id import read_stats
from torchrec_dyn.whole_model.tables import ShardedCollection, collections_of, table_names

# Stats that describe a table as it is now. All others are counts, which a resumed hook continues.
_PRESENT = {
    *("rows", "limit", "bytes", "step", "waiting", "withheld"),
    *("slots", "load", "probe_length_mean", "probe_length_max"),
}

# Charts of a table by title. Lines of one chart have one unit.
_CHARTS = {
    "rows and their limit": ("rows", "limit"),
    "occurrences in training": ("ids_seen", "hits", "unseen", "refused"),
    "ids inserted and removed": ("inserted", "evicted_expired", "evicted_full", "erased"),
    "ids that wait for admission": ("waiting", "counters_dropped", "counters_expired"),
    "bytes": ("bytes",),
    "probe length": ("probe_length_mean", "probe_length_max"),
    "late and non-finite updates": ("late_grads", "nonfinite"),
    "rows between host and GPU": ("rows_loaded", "rows_written_back"),
}


@not_compiled
def log_stats(model: nn.Module, to: Any, step: int, *, totals: bool = False) -> None:
    """Writes the stats of every dynamic table of a model.

    Names have the form "collection/table/stat", e.g. "model.ebc/user/hits". The collection is given by its
    path in the model without the wrappers DistributedModelParallel and DDP, so sharded and unsharded models
    have the same names. For a model that is itself a collection the name is "user/hits".

    Args:
        model: a model with dynamic collections, sharded or not.
        to: a dict, to which each value is added under its name, or a writer with
            `add_scalar(name, value, step)`. With `totals=True` also None: the rank takes part and writes
            nothing.
        step: step to write with the values. The stat "step" of each table is its number of training steps.
        totals: False: the stats of this rank's shards. True: those of whole tables, as `read_stats` returns
            them; the call is then collective.

    Raises:
        ValueError: if the model has no dynamic collection, or `to` is neither a dict nor a writer.
        OSError: if the writer cannot write because the disk is full or fails; the error names the writer's
            `log_dir`. A `SummaryWriter` writes later, so one of the next calls raises the error. The tables
            have not changed.
    """
    _check_logger(to, "log_stats", totals)
    _write(_scalars(model, "log_stats", totals), to, step)


def add_stats_hook(
    model: nn.Module, to: Any, every: int = 100, *, totals: bool = False
) -> StatsHook:
    """Registers a hook that writes a model's stats after every `every` training forwards.

    The step that the hook writes is the number of training forwards since its registration. Evaluation is not
    counted. A restarted job that loads the hook's `state_dict()` continues both the steps and the counts of
    the tables.

    Args:
        model: the module that the training loop or the pipeline calls: a plain model, or a model in
            DistributedModelParallel.
        to: as in `log_stats`.
        every: number of training forwards between two writes.
        totals: as in `log_stats`. True: every rank registers the hook, with the same `every`, and each write
            is collective.

    Returns:
        A handle; its `remove()` removes the hook.

    Raises:
        ValueError: if the model has no dynamic collection, `to` is neither a dict nor a writer, or `every`
            is not an integer above 0.
    """
    _check_logger(to, "add_stats_hook", totals)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"add_stats_hook.every: expected an integer above 0, got {every!r}.")
    collections_of(model, "add_stats_hook")
    return StatsHook(model, to, every, totals)


class StatsHook(RemovableHandle):
    """The handle of a hook that `add_stats_hook` registered, with a state to save in checkpoints.

    Counts of tables, such as "hits", start at 0 in a new process, since table checkpoints do not contain
    them. Save `state_dict()` with the dense part of the model, and load it after the model: the hook then
    writes steps and counts as if the job had not ended. `dcp.save` and `dcp.load` also take the hook itself.
    """

    def __init__(self, model: nn.Module, to: Any, every: int, totals: bool) -> None:
        self._model = weakref.ref(model)  # a handle keeps no tables in memory
        self._totals = totals
        self._forwards = 0
        self._carried: dict[str, int | float] = {}  # added to the counts, by name

        # A function: copies of the model share it, as they share hooks of torch's. Each call searches the
        # collections again, because sharding after the registration replaces them.
        def count_and_log(module: nn.Module, batch: object, output: object) -> None:
            if module.training:
                self._forwards += 1
                if self._forwards % every == 0:
                    scalars = _scalars(module, "add_stats_hook", totals)
                    for name in scalars.keys() & self._carried.keys():
                        scalars[name] += self._carried[name]
                    _write(scalars, to, self._forwards)

        # The state of torch's handle: its place among the model's hooks.
        self.__setstate__(model.register_forward_hook(count_and_log).__getstate__())

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of forwards, and the counts of the tables so far.

        With `totals=True` the call is collective, and the state is the same on every rank and fits any number
        of ranks and any plan. Otherwise the counts of a sharded model are those of this rank, so each rank
        saves its own state.
        """
        counts = self._counts("state_dict")
        counts = {name: count + self._carried.get(name, 0) for name, count in counts.items()}
        # dcp saves a list as one item: so an old checkpoint loads, though a table or a count is new.
        return {"forwards": self._forwards, self._key(): list(counts.items())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a saved state. Call it after the model is loaded; collective with `totals=True`.

        The counts of a table that is not in the state start at 0; those of a table that is not in the model
        are dropped.

        Args:
            state_dict: as `state_dict` returned it.

        Raises:
            ValueError: if this is not the state of a hook, or it has the counts of another rank or number of
                ranks; nothing has changed then.
        """
        key = self._key()
        forwards = state_dict.get("forwards")
        if not isinstance(forwards, int) or forwards < 0 or key not in state_dict:
            raise ValueError(
                f"StatsHook.load_state_dict: expected a state with 'forwards' and {key!r}, got "
                f"{sorted(state_dict)}. Without totals=True each rank loads what it saved, on as many ranks."
            )
        now = self._counts("load_state_dict")
        saved = dict(state_dict[key])
        self._carried = {name: saved[name] - now[name] for name in now if name in saved}
        self._forwards = forwards

    def _counts(self, method: str) -> dict[str, int | float]:
        """Returns the counts of the tables by name, as they are now, without those carried."""
        scalars = _scalars(self._live_model(), f"StatsHook.{method}", self._totals)
        return {name: n for name, n in scalars.items() if name.rpartition("/")[2] not in _PRESENT}

    def _key(self) -> str:
        """Returns the key of the counts in a state: it names the rank whose counts they are."""
        for _, collection in collections_of(self._live_model(), "StatsHook"):
            if isinstance(collection, ShardedCollection) and not self._totals:
                env = collection._env
                if env.world_size > 1:
                    return f"counts_of_rank_{env.rank}_of_{env.world_size}"
        return "counts"

    def _live_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ValueError(
                "StatsHook: expected its model, got one that was deleted. Keep the model."
            )
        return model


def stats_layout(model: nn.Module) -> dict[str, dict[str, list[Any]]]:
    """Returns a layout of a model's stats for the tab "Custom Scalars" of TensorBoard.

    Pass it to `SummaryWriter.add_custom_scalars`, once. Each table is a category with a few charts, such as
    rows beside their limit. Not collective; sharded and unsharded models have the same layout.

    Args:
        model: a model with dynamic collections, sharded or not.

    Raises:
        ValueError: if the model has no dynamic collection.
    """
    # TensorBoard takes a tag for a regular expression, and matches it at the beginning of names.
    return {
        prefix: {
            title: ["Multiline", [re.escape(f"{prefix}/{name}") + "$" for name in names]]
            for title, names in _CHARTS.items()
        }
        for path, collection in collections_of(model, "stats_layout")
        for prefix in (_name(path, table) for table in table_names(collection))
    }


def _scalars(model: nn.Module, call: str, totals: bool) -> dict[str, int | float]:
    """Returns the stats of all tables by name. With totals, collective."""
    return {
        f"{_name(path, table)}/{name}": value
        for path, collection in collections_of(model, call)
        for table in table_names(collection)
        for name, value in (
            read_stats(collection, table) if totals else collection.table(table).stats()
        ).items()
    }


def _name(path: str, table: str) -> str:
    return f"{path}/{table}" if path else table


def _write(scalars: Mapping[str, int | float], to: Any, step: int) -> None:
    if to is None:
        return
    for name, value in scalars.items():
        if isinstance(to, MutableMapping):
            to[name] = value
        else:
            with naming(str(getattr(to, "log_dir", to))):
                to.add_scalar(name, value, step)


def _check_logger(to: object, where: str, totals: bool) -> None:
    if totals and to is None:
        return
    if not isinstance(to, MutableMapping) and not callable(getattr(to, "add_scalar", None)):
        raise ValueError(
            f"{where}.to: expected an object with add_scalar, as TensorBoard's SummaryWriter, or a "
            f"dict, got {type(to).__name__}."
        )
