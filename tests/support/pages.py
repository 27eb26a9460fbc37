"""Runs the code of a Markdown page, as a reader would who saved it as a file.

All python blocks of a page are one program. A page that calls `init_process_group` runs in two processes with
the environment of `torchrun --nproc-per-node 2`, any other page in one.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import sys
import types
import warnings
from pathlib import Path

import forked
import torch
import torch.distributed as dist

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TIME_LIMIT = 120.0  # seconds; a page takes a few


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Returns (lines before it, code) of every python block."""
    return [
        (text.count("\n", 0, match.start(2)), match[2])
        for match in BLOCK.finditer(text)
        if match[1] == "python"
    ]


def run(page: Path, time_limit: float = TIME_LIMIT) -> None:
    """Runs the code of a page.

    Raises:
        AssertionError: if a process failed or hung; tracebacks name lines of the page.
    """
    ranks = 2 if "init_process_group" in page.read_text() else 1
    # As torchrun does: the store is here, so no rank has to find a free port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forked.run(_run_rank, [(page, rank, ranks, store.port) for rank in range(ranks)], time_limit)


def _run_rank(page: Path, rank: int, ranks: int, port: int) -> None:
    """Runs all blocks in one namespace, as the module `__main__`."""
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
            GLOO_SOCKET_IFNAME="lo",
        )
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    warnings.filterwarnings("error", category=UserWarning, module="torchrec_dyn")
    with contextlib.redirect_stdout(io.StringIO()):
        for line, code in python_blocks(page.read_text()):
            # Empty lines before the code: a traceback names the line of the page.
            exec(compile("\n" * line + code, str(page), "exec"), main.__dict__)
    assert not dist.is_initialized(), f"{page.name}: expected destroy_process_group() at the end"
    main.__dict__.clear()
    gc.collect()
