"""The tensors of a saved table, and the content sums by which it is checked before any of it is used.

The sum of a tensor of rows does not depend on how rows and columns are split. So every rank sums its own
part, and the total is the sum of the whole table, under any plan. One wrong number always changes the sum.

Legend: R rows of a table, M rows, D columns, N removed ids, Q waiting ids, K times, S ranks that have saved
rows, W summed tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.initializers import table_key
from torchrec_dyn.optimizers import STATE_NAMES
from torchrec_dyn.storage import canonical_keys, signed, unsigned

# The tensors of a table in the model's and in the optimizer's state dict, but for their checksums.
MODEL_TENSORS = ("ids", "weight", "last_seen", "count", "waiting", "clock", "config")
OPTIMIZER_TENSORS = ("step", "optimizer_config", *STATE_NAMES)
# The order of the words of sums.
SUMMED = (*MODEL_TENSORS, *OPTIMIZER_TENSORS)
_SMALL = [SUMMED.index(name) for name in ("clock", "config", "step", "optimizer_config")]
# A row of a checksum has these words and the step of the save.
CHECKSUM_WORDS = len(SUMMED) + 1
# Rows are summed as they are read, so a checksum is read last, also where TorchRec sorts the keys.
MODEL_CHECKSUM, OPTIMIZER_CHECKSUM = "weight_checksum", "optimizer_checksum"
# The keys of a table in the model's state dict.
MODEL_NAMES = ("config", "clock", "ids", "last_seen", "count", "waiting", "weight", MODEL_CHECKSUM)
ROW_TENSORS = ("ids", "weight", "last_seen", "count", *STATE_NAMES)
SMALL_TENSORS = ("waiting", "clock", "config", "step", "optimizer_config")
SHAPES = {
    "ids": "[R] int64",
    "weight": "[R, D]",
    "last_seen": "[R] int64",
    "count": "[R] int64",
    "waiting": "[Q, 3] int64",
    "clock": "[2, K] int64",
    "config": "[n] uint8",
    MODEL_CHECKSUM: f"[S, {CHECKSUM_WORDS}] int64",
    **dict.fromkeys(STATE_NAMES, "[R, columns] float32"),
    "step": "[] int64",
    "optimizer_config": "[n] uint8",
    OPTIMIZER_CHECKSUM: f"[S, {CHECKSUM_WORDS}] int64",
    "removed": "[N] int64",
    "base": f"[{len(SUMMED)}] int64",
    "result": f"[{len(SUMMED)}] int64",
}
# The end of every message about damage.
DAMAGED = "The checkpoint is damaged; use an earlier checkpoint."


def rows_summed(row_bytes: int, device: torch.device) -> int:
    """Returns the number of rows that are copied and summed at a time."""
    # The host waits for each sum of a GPU, so a GPU sums as many rows as cross to the host at a time.
    most = knobs.SUMMED_BYTES if device.type == "cpu" else knobs.CROSSING_BYTES
    return max(1, most // row_bytes)


def content_sum(table: str, name: str, ids: Tensor, values: Tensor, first_column: int = 0) -> int:
    """Returns the content sum of rows of one tensor, in [0, 2^64) (formula: csrc/storage/content_sum.h).

    values [M, D] or [M], of ids [M] int64, begin at `first_column` of the whole tensor.
    """
    columns = values.reshape(ids.numel(), -1) if ids.numel() else values.new_empty(0, 1)
    key = table_key(0, table, f"sum {name}")
    if ids.device != values.device:  # of a state dict that was loaded onto another device
        ids = ids.to(values.device)
    return unsigned(int(ops.content_sum(ids, columns.contiguous(), first_column, key)))


def sum_of_small(table: str, name: str, saved: Tensor) -> int:
    """Returns the content sum of "clock" [2, K], "waiting" [Q, 3], "step" [] or a config [n]."""
    rows = saved.t() if name == "clock" else saved if saved.dim() == 2 else saved.reshape(-1, 1)
    rows = rows.to(torch.int64)
    if name == "waiting":
        return content_sum(table, name, rows[:, 0].contiguous(), rows)
    key = name.removeprefix("optimizer_")  # both configs
    return content_sum(table, key, torch.arange(len(rows), device=rows.device), rows)


def add_sums(*sums: Mapping[str, int]) -> dict[str, int]:
    """Returns the sums of parts added up, tensor by tensor, modulo 2^64."""
    names = dict.fromkeys(name for part in sums for name in part)
    return {name: unsigned(sum(part.get(name, 0) for part in sums)) for name in names}


def as_words(sums: Mapping[str, int]) -> Tensor:
    """Returns sums by tensor as words [W] int64, 0 for a tensor without a sum; W is `len(SUMMED)`."""
    return torch.tensor([signed(sums.get(name, 0)) for name in SUMMED], device="cpu")


def from_words(words: Tensor) -> dict[str, int]:
    """Returns the content sums in words [W] int64, or in rows of a checksum, [S, W + 1] int64."""
    if words.dim() == 1:
        words = torch.nn.functional.pad(words, (0, 1))[None]
    sums = words.sum(0)
    same = [*_SMALL, len(SUMMED)]  # in every row
    sums[same] = words[0, same]
    if (words[:, same] != sums[same]).any():
        raise ValueError(
            f"checksum: expected rows of one save, got those of several saves in one directory. {DAMAGED}"
        )
    return dict(zip(SUMMED, map(unsigned, sums.tolist()), strict=False))


def compare_sums(
    where: str, saved: Mapping[str, int], names: Iterable[str], summed: Mapping[str, int]
) -> None:
    """Raises ValueError if a content sum of `names` differs from the saved one; a tensor not summed has 0."""
    for name in names:
        if saved[name] != summed.get(name, 0):
            raise ValueError(
                f"{where}: expected {name} with content sum {saved[name]:016x}, got "
                f"{summed.get(name, 0):016x}. {DAMAGED}"
            )


def fits(name: str, shape: Sequence[int], dtype: torch.dtype, sizes: Mapping[str, int]) -> bool:
    """Returns True if a tensor has the shape and dtype in `SHAPES`; other words match any size."""
    words, _, its_dtype = SHAPES[name][1:].partition("]")
    rules = [word.strip() for word in words.split(",") if word]
    if its_dtype.strip() not in ("", str(dtype).removeprefix("torch.")):
        return False
    return len(rules) == len(shape) and all(
        size == sizes.get(rule, int(rule) if rule.isdigit() else size)
        for rule, size in zip(rules, shape, strict=True)
    )


def is_canonical(ids: Tensor) -> bool:
    """Returns True if ids [M] int64 are distinct and in canonical order."""
    keys = canonical_keys(ids)
    return bool((keys[1:] > keys[:-1]).all())
