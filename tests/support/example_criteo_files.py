"""Generates Criteo logs for the tests of the example."""

import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

NAMES = ["label", *(f"I{i + 1}" for i in range(13)), *(f"C{i + 1}" for i in range(26))]


def fields(**changed: str) -> list[str]:
    """Returns the 40 fields of a valid line; `changed` replaces fields by name."""
    good = ["1", *(str(i) for i in range(13)), *(f"{0xA0 + i:08x}" for i in range(26))]
    return [changed.get(name, text) for name, text in zip(NAMES, good, strict=True)]


def line(separator: str = "\t", **changed: str) -> str:
    return separator.join(fields(**changed))


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def learnable_lines(count: int, seed: int = 0) -> list[str]:
    """Returns lines whose label depends on the id in C1 in nine of ten lines; some fields are empty."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 40, (count, 26))
    follows = random.random(count) < 0.9
    empty = random.random((count, 25)) < 0.1
    lines = []
    for row in range(count):
        label = (ids[row, 0] % 2 == 0) == follows[row]
        text = [f"{value:08x}" for value in ids[row]]
        text[1:] = ["" if gone else one for gone, one in zip(empty[row], text[1:], strict=True)]
        lines.append("\t".join([str(int(label)), *["7"] * 12, "", *text]))
    return lines
