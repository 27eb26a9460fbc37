"""Models whose tables were saved under other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint_cases import Setup, contents, differences
from sharded_cases import Case

RENAME = {"plain": "flat", "counted": "tally"}
NAMES = ("plain", "sixteen", "counted")


@dataclass(frozen=True)
class Renamed(Setup):
    """A setup some of whose tables have other names; their features, plans and options are the same."""

    names: tuple[str, ...] = NAMES
    others: tuple[tuple[str, str], ...] = tuple(RENAME.items())

    def case(self) -> Case:
        """Returns the case with the other names."""
        case = super().case()
        for table in case.tables:
            table.name = dict(self.others).get(table.name, table.name)
        return case


def under_new_names(saved: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    """Returns tensors by keys with new names."""
    renamed = {}
    for key, value in saved.items():
        for old, new in rename.items():
            key = "/".join(
                ".".join(new if word == old else word for word in part.split("."))
                for part in key.split("/")
            )
        renamed[key] = value
    return renamed


def named_apart(path: Path | str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a checkpoint whose bytes do not contain the name of their table."""
    return {
        key: tensor
        for key, tensor in contents(path).items()
        if not key.endswith(("config", "checksum"))
    }


def check_same_contents(saved: Path | str, again: Path | str, rename: Mapping[str, str]) -> None:
    """Asserts that a checkpoint has the contents of another one under new names."""
    expected = under_new_names(named_apart(saved), rename)
    assert len(expected) > 10
    assert not differences(named_apart(again), expected)
