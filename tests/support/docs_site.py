"""Builds the site of docs/, as `make docs` does."""

from __future__ import annotations

from pathlib import Path

from forked import run_ranks


def build(docs: Path, out: Path) -> None:
    """Builds the site into a folder.

    Raises:
        AssertionError: the build has warnings; the message lists them.
    """
    ended = run_ranks(_build, docs, out, time_limit=300.0)
    assert ended.codes == [0], ended.stderr


def _build(docs: Path, out: Path) -> None:
    from sphinx.cmd.build import build_main

    code = build_main(["-W", "--keep-going", "-n", "-q", str(docs), str(out)])
    assert code == 0, "warnings are errors"
