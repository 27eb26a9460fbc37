"""The folders of a checkpoint directory that are no longer kept, and their removal.

Newer folders are removed first: a kill in between leaves no delta whose full save is gone. What earlier kills
and crashes left goes, too, when it is older than all that is kept, and that is the number to keep.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Set
from pathlib import Path

from torchrec_dyn.checkpoint_format import Entry, SavedChain, open_files

WRITING, _PRUNED = ".writing-", ".pruned-"


def outdated(chain: SavedChain, keep: int, root: str | None, damaged: Set[str]) -> list[Path]:
    """Returns the folders to remove, newest first.

    Kept are the newest full saves that are whole, and all that they lead to. A delta without its full save,
    and a folder that is torn or damaged, stay until `keep` full saves are whole and the oldest that is kept
    is newer. What the file system fails to read may be whole: it is not removed and not counted, nor is what
    it may lead to removed.

    `keep` full saves are kept, and in any case the one with the id `root`, if it is not None. `damaged` are
    ids of full saves that could not be loaded. The disk may have failed for a moment then; with the rule
    above none goes that would stay if it were whole.
    """
    fulls = [entry for entry in chain.entries if entry.is_full]
    sound: list[Entry] = []
    broken, unread = set(damaged), set[str]()
    for one in reversed(fulls):
        # The one at `root` was saved or loaded by this job. Nothing is removed while there are few.
        if one.id not in broken and len(sound) < keep:
            try:
                if one.id != root and len(fulls) > keep:
                    open_files(one.tables)
            except ValueError:
                broken.add(one.id)
            except (OSError, MemoryError):
                unread.add(one.id)
            else:
                sound.append(one)
    kept = {one.id: one for one in fulls if one in sound or one.id == root}
    oldest = min(one.sequence for one in kept.values()) if len(sound) == keep else 0
    removed = {sequence: path for sequence, path in chain.torn.items() if sequence < oldest}
    for entry in chain.entries:
        full = chain.fulls.get(entry.id)
        if full is None:
            is_outdated = entry.sequence < min([oldest, *chain.unread])
        elif full.id in broken:
            is_outdated = entry.sequence < oldest
        else:
            is_outdated = full.id not in kept and full.id not in unread
        if is_outdated:
            removed[entry.sequence] = entry.path
    return [removed[sequence] for sequence in sorted(removed, reverse=True)]


def entry_folders(path: Path) -> list[Path]:
    """Returns the folders of a checkpoint directory that have the name of an entry, whatever is in them."""
    return sorted(one for one in path.iterdir() if one.name.startswith(("full-", "delta-")))[::-1]


def remove(paths: Iterable[Path]) -> list[Path]:
    """Removes folders of entries, and returns them. A reader finds a whole entry or none.

    Files that cannot be removed stay in a hidden folder, for `remove_hidden`.

    Raises:
        OSError: a folder cannot be renamed.
    """
    removed = []
    for path in paths:
        aside = path.parent / f"{_PRUNED}{path.name}-{secrets.token_hex(8)}"
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        removed.append(path)
    return removed


def remove_hidden(path: Path, ignore_errors: bool) -> None:
    """Removes what saves and removals that did not end have left in a checkpoint directory.

    Raises:
        OSError: without `ignore_errors`, a file cannot be removed.
    """
    for pattern in (WRITING, _PRUNED):
        for folder in path.glob(f"{pattern}*"):
            shutil.rmtree(folder, ignore_errors=ignore_errors)
