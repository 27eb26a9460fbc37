"""Reads the Criteo click log as a stream: one line is one click, nothing is stored or indexed.

The format (https://ailab.criteo.com/ressources): label (0 or 1), 13 integers, 26 hexadecimal
categoricals, separated by tabs, no header. Any field except the label may be empty. Other accepted formats:
the same fields separated by commas, with a header line `label,I1,..,I13,C1,..,C26`; and both formats
compressed with gzip.
"""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from parts.clicks import CATEGORICAL_NAMES, INTEGER_NAMES, NUM_CATEGORICALS, NUM_INTEGERS, Clicks

FIELDS = ["label", *INTEGER_NAMES, *CATEGORICAL_NAMES]
LABEL = "[01]"
INTEGER = r"-?[0-9]{1,18}(?:\.0*)?"  # "260.0": pandas writes integers in this form
HEXADECIMAL = "[0-9a-fA-F]{1,16}"
CLICK = re.compile(  # fields separated by tabs or by commas, not by both
    rf"({LABEL})(?P<separator>[\t,])"
    + "(?P=separator)".join(
        [rf"({INTEGER}|)"] * NUM_INTEGERS + [rf"({HEXADECIMAL}|)"] * NUM_CATEGORICALS
    )
)
GZIP_MAGIC = b"\x1f\x8b"
MOST_COMPLAINTS = 5  # maximum number of skipped bad lines that each reader reports on stderr

Click = tuple[int, list[float], list[int], list[bool]]  # label, integers, unsigned ids, present


class BadLine(ValueError):
    """A line of the log that is not a click. The message names file, line and field."""


class BrokenFile(BadLine):
    """A gzipped file that is truncated or damaged. The message names the last good line."""


def parse_click(line: str) -> Click:
    """Returns the click of one line.

    Raises:
        ValueError: if the line is not a click. The message names the first invalid field.
    """
    match = CLICK.fullmatch(line)
    if match is None:
        raise ValueError(_what_is_wrong(line))
    label, _, *fields = match.groups()
    categoricals = fields[NUM_INTEGERS:]
    return (
        int(label),
        [float(text or 0) for text in fields[:NUM_INTEGERS]],
        [int(text, 16) if text else 0 for text in categoricals],
        [text != "" for text in categoricals],
    )


def _what_is_wrong(line: str) -> str:
    fields = line.split("\t" if "\t" in line else ",")
    if len(fields) != len(FIELDS):
        return f"expected {len(FIELDS)} fields, got {len(fields)}."
    rules = [
        (LABEL, "0 or 1"),
        *[(f"{INTEGER}|", "an integer of at most 18 digits, or nothing")] * NUM_INTEGERS,
        *[(f"{HEXADECIMAL}|", "1 to 16 hexadecimal digits, or nothing")] * NUM_CATEGORICALS,
    ]
    return next(
        f"{name}: expected {rule}, got {text[:40]!r}."
        for name, text, (pattern, rule) in zip(FIELDS, fields, rules, strict=True)
        if not re.fullmatch(pattern, text)
    )


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its end). Decompresses a gzipped file.

    Raises:
        BrokenFile: if a gzipped file is truncated or damaged.
    """
    with path.open("rb") as file:
        is_gzip = file.read(2) == GZIP_MAGIC
    number = 0
    # An invalid byte becomes U+FFFD. No field accepts it, so the line is reported as a bad line.
    with (gzip.open if is_gzip else open)(
        path, "rt", encoding="utf-8-sig", errors="replace"
    ) as file:
        try:
            for line in file:
                number += 1
                yield number, line.rstrip("\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BrokenFile(
                f"{path}, after line {number}: expected a whole gzip file, got {error}. "
                "Fetch the file again, or keep what is there with --on-bad-line skip."
            ) from None


def read_clicks(
    path: Path, wanted: Callable[[int], bool], on_bad_line: str = "error"
) -> Iterator[Click]:
    """Yields the clicks of the wanted lines, in the order of the file.

    Args:
        path: path of the log.
        wanted: function of a line number (from 1): True to read the line. Other lines are not parsed.
        on_bad_line: "error" raises an error at the first wanted line that is not a click; "skip" skips such
            lines and reports the first of them, and finally their number, on stderr.

    Raises:
        BadLine: see `on_bad_line`.
    """
    skipped = 0

    def complain(message: str) -> None:
        nonlocal skipped
        if on_bad_line == "error":
            raise BadLine(message) from None
        skipped += 1
        if skipped <= MOST_COMPLAINTS:
            print(f"\nskipped: {message}", file=sys.stderr)  # on a new line, not in a progress bar

    try:
        for number, line in read_lines(path):
            if not wanted(number) or (number == 1 and line.split(",") == FIELDS):
                continue
            try:
                click = parse_click(line)
            except ValueError as error:
                complain(f"{path}, line {number}: {error}")
            else:
                yield click
    except BrokenFile as error:
        complain(str(error))
    if skipped > MOST_COMPLAINTS:
        print(f"\nskipped: {skipped} lines of {path} in all", file=sys.stderr)


def in_batches(clicks: Iterator[Click], batch_size: int) -> Iterator[Clicks]:
    """Yields clicks in batches; the last batch may be shorter."""
    while chunk := list(islice(clicks, batch_size)):
        labels, integers, ids, present = zip(*chunk, strict=True)
        yield Clicks(
            labels=np.array(labels, dtype=np.int64),
            integers=np.array(integers, dtype=np.float64),
            # Numbers of 2^63 or more become negative ids, so no two numbers share an id.
            ids=np.array(ids, dtype=np.uint64).view(np.int64),
            present=np.array(present, dtype=bool),
        )
