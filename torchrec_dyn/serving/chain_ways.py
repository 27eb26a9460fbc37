"""Ways of served rows to an entry of a directory of `Checkpoints`: by deltas, or from a full save.

An entry names the entry before it by its random id (checkpoint_format/entries.py), a full save too. So
a fork of the chain is seen: training was restored at an older entry and went on from there, and what is
served is of the way that was left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_dyn.checkpoint_format import Entry, SavedChain
from torchrec_dyn.serving.manifest import ServedEntry


class ForkedChain(ValueError):
    """The newest entry does not come after what is served: it is of another way of training."""


@dataclass(frozen=True)
class Way:
    """The entries that lead from served rows to an entry, in order.

    Attributes:
        entries: deltas; before them a full save, if the tables are to be built.
        is_fork: True if what is served is not before these entries, but on a way that training left.
    """

    entries: Sequence[Entry]
    is_fork: bool


def way_to(
    chain: SavedChain, entry: Entry, served: ServedEntry | None, is_lost: bool = False
) -> Way | None:
    """Returns the shortest way to an entry; None if an entry of it is missing.

    Deltas do not lead across a full save. So the way begins at what is served or at the newest full save, and
    is the one with the fewest bytes. With `is_lost` no delta can be applied to what is served: the way begins
    at the full save.
    """
    way: list[Entry] = []
    begin = None if is_lost else served
    for one in chain.backward(entry):
        if begin is not None and one.id == begin.id:
            return Way(way[::-1], False)
        way.append(one)
        if one.is_full:
            return Way(way[::-1], served is not None and is_fork(chain, entry, served))
        if begin is not None and one.parent == begin.id:
            return Way(way[::-1], False)
    return None


def is_fork(chain: SavedChain, entry: Entry, served: ServedEntry) -> bool:
    """Returns True if what is served is not among the entries before an entry.

    False if entries between the two were removed.
    """
    if is_replaced(chain, served):
        return True
    for one in chain.backward(entry):
        if one.sequence <= served.sequence:
            return one.id != served.id
        if one.parent is None or one.parent == served.id:
            return one.parent is None
    return False


def is_replaced(chain: SavedChain, served: ServedEntry) -> bool:
    """Returns True if the directory has entries of another chain, or lost the end of the chain."""
    others = [one.sequence == served.sequence and one.id != served.id for one in chain.entries]
    return any(others) or (bool(others) and chain.highest < served.sequence)
