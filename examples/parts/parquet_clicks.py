"""Reads clicks from a Parquet file: a column `label` and columns of integer ids, in the order of time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from parts.parquet_file import check_no_nulls, open_parquet

LABEL = "label"
WHAT_IT_HAS = (
    f"a column `{LABEL}` of 0 and 1; each other column is a feature of integer ids with a table of its own; "
    "no nulls; rows in the order of time"
)


def read_clicks(
    path: Path, batch_size: int, most: int | None
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Reads whole batches; clicks at the end that fill no batch are left out.

    Args:
        path: path of the file.
        batch_size: B, clicks of a batch.
        most: number of batches to read at most; None: all.

    Returns:
        names: of the F features.
        ids: [batches, F, B] int64. Unsigned numbers of 2^63 or more become negative ids.
        labels: [batches, B] float32.

    Raises:
        ValueError: if the file is no Parquet file or its columns are not as `WHAT_IT_HAS` says. The
            message names the column.
    """
    import pyarrow

    file, kinds = open_parquet(path)
    names = [name for name in kinds if name != LABEL]
    if LABEL not in kinds or not names:
        raise ValueError(f"{path}: expected {WHAT_IT_HAS}; got the columns {', '.join(kinds)}.")
    for name in names:
        if not pyarrow.types.is_integer(kinds[name]):
            raise ValueError(
                f"{path}, column {name}: expected integers, got {kinds[name]}. Drop the column, or "
                "hash its strings with torchrec_dyn.hash_strings first."
            )
    columns: dict[str, list[np.ndarray]] = {name: [] for name in kinds}
    clicks = 0
    for part in file.iter_batches(batch_size):  # a part may be shorter
        if most is not None and clicks >= most * batch_size:
            break
        clicks += part.num_rows
        for name in kinds:
            column = part.column(name)
            check_no_nulls(path, name, column)
            columns[name].append(column.to_numpy(zero_copy_only=False))
    whole = {name: np.concatenate(parts or [[]]) for name, parts in columns.items()}
    batches = clicks // batch_size
    if batches < 2:
        raise ValueError(
            f"{path}: expected at least two batches of {batch_size} clicks, got {clicks} clicks. Use "
            "a longer file, or a smaller --batch-size."
        )
    if not np.isin(whole[LABEL], (0, 1)).all():
        raise ValueError(f"{path}, column {LABEL}: expected 0 and 1, got other values.")
    shaped = [whole[name][: batches * batch_size].reshape(batches, batch_size) for name in kinds]
    of = dict(zip(kinds, shaped, strict=True))
    ids = np.stack([of[name].astype(np.int64, copy=False) for name in names], axis=1)
    return names, ids, of[LABEL].astype(np.float32)
