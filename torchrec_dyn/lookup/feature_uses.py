"""FeatureUses: which ids of a training batch may insert, count and train, by their features.

Most groups have no such features, and then nothing here runs.

Legend: F features (in table order), N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_dyn.config import DynamicTableConfig, FeatureUse


@dataclass(frozen=True)
class Uses:
    """Uses of F features, [F] bool on the CPU, or of N ids, [N] bool; None: all are True.

    Attributes:
        inserts, counts, trains: as in `FeatureUse`.
    """

    inserts: Tensor | None
    counts: Tensor | None
    trains: Tensor | None

    def of_ids(self, sizes: Sequence[int] | Tensor, ids: Tensor) -> Uses:
        """Returns the uses of ids [N], of these uses of features; sizes [F], the ids of each feature."""
        device = ids.device
        if not isinstance(sizes, Tensor):
            sizes = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        # Not waited for: the copies are in the order of the stream.
        sizes = sizes.to(device, non_blocking=True)

        def spread(flags: Tensor | None) -> Tensor | None:
            if flags is None:
                return None
            flags = flags.to(device, non_blocking=True)
            return flags.repeat_interleave(sizes, output_size=ids.numel())

        return Uses(spread(self.inserts), spread(self.counts), spread(self.trains))


def uses_of(tables: Sequence[tuple[DynamicTableConfig, Sequence[str]]]) -> Uses | None:
    """Returns the uses of the features of tables; None if all do all.

    tables: the config and the names of the features of each table, in table order.
    """
    uses = [use for config, names in tables for use in uses_by_feature(config, names)]
    flags = Uses(
        _flags([use.inserts for use in uses]),
        _flags([use.counts for use in uses]),
        _flags([use.trains for use in uses]),
    )
    all_do_all = flags.inserts is None and flags.counts is None and flags.trains is None
    return None if all_do_all else flags


def uses_by_feature(config: DynamicTableConfig, names: Sequence[str]) -> list[FeatureUse]:
    """Returns the use of each of the features of one table."""
    given = {use.feature: use for use in config.features}
    return [given.get(name, FeatureUse(name)) for name in names]


def _flags(values: list[bool]) -> Tensor | None:
    return None if all(values) else torch.tensor(values, device="cpu")


def masked(rows: Tensor, kept: Tensor | None) -> Tensor:
    """Returns rows [N] int64 with -1 where kept [N] bool is False; the same tensor if it is None."""
    return rows if kept is None else rows.masked_fill(~kept, -1)
