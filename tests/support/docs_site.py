"""Builds the site of docs/, as `make docs` does."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import forked


def build(docs: Path, out: Path, time_limit: float = 300.0) -> None:
    """Builds the site into a folder.

    Raises:
        AssertionError: with all warnings, if there is one.
    """
    forked.run(_build, [(docs, out)], time_limit)


def _build(docs: Path, out: Path) -> None:
    from sphinx.cmd.build import build_main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = build_main(["-W", "--keep-going", "-n", "-q", str(docs), str(out)])
    assert code == 0, said.getvalue()
