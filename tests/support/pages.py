"""Runs the code of a Markdown page as if a reader had saved it to a file.

All python blocks of a page are one program. A page that calls `init_process_group` runs in two processes, as
under `torchrun --nproc-per-node 2`; any other page runs in one process. Our commands that a page starts by
subprocess.run are forks of this process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import tempfile
import types
import warnings
from pathlib import Path

from forked import run_ranks
from forked_commands import forked_commands

# (word behind the fence, text). Directives of MyST are blocks too: else the end of one would open a block.
BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.M | re.S)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Returns (lines before it, code) of every python block."""
    return [
        (text.count("\n", 0, match.start(2)), match[2])
        for match in BLOCK.finditer(text)
        if match[1] == "python"
    ]


def run(page: Path, time_limit: float = 120.0) -> None:
    """Runs the code of a page."""
    ranks = 2 if "init_process_group" in page.read_text() else 1
    with tempfile.TemporaryDirectory(prefix="torchrec_dyn_page_") as folder:
        ended = run_ranks(run_rank, page, folder, time_limit, ranks=ranks, time_limit=time_limit)
    assert not any(ended.codes), f"{page.name} ended with {ended.codes}\n{ended.stderr}"


def run_rank(page: Path, folder: str, time_limit: float) -> None:
    """Runs all blocks in one namespace, as the module `__main__`, in a folder that is removed later."""
    starts_commands = "sys.executable" in page.read_text()
    with forked_commands(time_limit) if starts_commands else contextlib.nullcontext():
        _run_blocks(page, folder)


def _run_blocks(page: Path, folder: str) -> None:
    import torch.distributed as dist

    os.chdir(folder)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    warnings.filterwarnings("error", category=UserWarning, module="torchrec_dyn")
    for line, code in python_blocks(page.read_text()):
        # With empty lines before the code, a traceback names the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), main.__dict__)
    assert not dist.is_initialized(), "expected destroy_process_group() at the end of the page"
    # In torch 2.13 a gloo thread that drops its last tensor while the process ends aborts the process.
    main.__dict__.clear()
    gc.collect()
