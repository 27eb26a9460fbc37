"""Opens Parquet files whose columns are checked one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_parquet(path: Path) -> tuple[Any, dict[str, Any]]:
    """Returns a file of pyarrow and the types of its columns; raises ValueError if it is no Parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: expected a Parquet file, got: {error}.") from None
    return file, {field.name: field.type for field in file.schema_arrow}


def check_no_nulls(path: Path, name: str, column: Any) -> None:
    """Raises ValueError if a column has nulls."""
    if column.null_count:
        raise ValueError(f"{path}, column {name}: expected no nulls. Fill or drop them.")
