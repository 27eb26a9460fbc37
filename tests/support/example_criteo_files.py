"""Generates Criteo logs for the tests of the example."""

import sys
from pathlib import Path

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
