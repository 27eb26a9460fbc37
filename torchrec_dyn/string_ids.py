"""Ids of strings: the XXH3-64 of their UTF-8 bytes. The package xxhash computes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def hash_strings(strings: Iterable[Any]) -> Tensor:
    """Returns an id for each string: the 64 bits of its XXH3-64 with seed 0, read as a signed number.

    The same string has the same id in every process, version and program
    (https://github.com/Cyan4973/xxHash). Among n different strings, the probability that any two share an id
    is about n^2 / 2^65 (the birthday bound): 0.03 % for 10^8 strings, 2.7 % for 10^9.

    Args:
        strings: str or bytes, mixed or not: a list, an array of numpy or pyarrow (also chunked or
            dictionary-encoded), a pandas Series, or another iterable. A str is hashed as its UTF-8 bytes.
            numpy drops zeros at the end of a string, except in arrays of objects.

    Returns:
        [N] int64 on the CPU, in the order of the strings; an array of several dimensions is read row by row.

    Raises:
        ImportError: if the package xxhash is not installed.
        ValueError: if an element is not a string, such as None, or cannot be encoded as UTF-8.
    """
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError(
            "hash_strings: expected the package xxhash, got none. Run `pip install xxhash`."
        ) from error
    if isinstance(strings, (str, bytes)):
        raise ValueError(
            f"hash_strings: expected several strings, got one, {strings!r}. Pass a list."
        )
    listed = _listed(strings)
    wrong = {kind for kind in set(map(type, listed)) if not issubclass(kind, (str, bytes))}
    if wrong:
        place = next(n for n, string in enumerate(listed) if type(string) in wrong)
        raise ValueError(
            f"hash_strings: expected str or bytes, got {listed[place]!r} at place {place}. "
            "Replace what is missing; numbers need no hash, since any int64 is an id."
        )
    try:
        encoded = (string.encode() if isinstance(string, str) else string for string in listed)
        hashes = np.fromiter(map(xxh3_64_intdigest, encoded), np.uint64, len(listed))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"hash_strings: expected strings of Unicode, got {error.object!r}, which UTF-8 cannot "
            "encode. Pass bytes."
        ) from error
    return torch.from_numpy(hashes.view(np.int64))


def _listed(strings: Any) -> list[Any]:
    if isinstance(strings, np.ndarray):
        return strings.ravel().tolist()
    for method in ("to_pylist", "tolist"):  # of pyarrow, and of pandas
        if hasattr(strings, method):
            return getattr(strings, method)()
    return list(strings)
