"""Runs the code of a Markdown page as if a reader had saved it to a file.

All python blocks of a page are one program. A page that calls `init_process_group` runs in two processes, as
under `torchrun --nproc-per-node 2`; any other page runs in one process. Our commands that a page starts by
subprocess.run are forks of this process.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import runpy
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forked import run_ranks

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


_FORK = multiprocessing.get_context("fork")
_OURS = [sys.executable, "-m", "torchrec_dyn"]


@contextlib.contextmanager
def forked_commands(time_limit: float) -> Iterator[None]:
    """Has subprocess.run take our commands to forks of this process, as it is now: an import takes 3 s."""
    ours, theirs = _FORK.Pipe()
    server = _FORK.Process(target=_serve, args=(ours, theirs, time_limit))
    server.start()
    theirs.close()
    run = subprocess.run

    def run_forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if command[:3] != _OURS:
            return run(command, **options)
        check, captures = options.pop("check", False), options.pop("capture_output", False)
        is_text = options.pop("text", False)
        assert not options, f"expected check, capture_output and text only, got {options}"
        ours.send(([str(word) for word in command[3:]], os.getcwd()))
        code, *outputs = ours.recv()
        for number, output in enumerate(outputs, start=1):
            if not captures:
                os.write(number, output)
        shown = [text.decode() if is_text else text for text in outputs] if captures else [None] * 2
        done = subprocess.CompletedProcess(command, code, *shown)
        if check:
            done.check_returncode()
        return done

    subprocess.run = run_forked  # type: ignore[assignment]
    try:
        yield
    finally:
        subprocess.run = run
        ours.close()
        server.join()


def _serve(
    ours: multiprocessing.connection.Connection,
    theirs: multiprocessing.connection.Connection,
    time_limit: float,
) -> None:
    """Answers (arguments, folder) with (exit status, stdout, stderr) until the program has ended."""
    ours.close()  # else the end of the program would not be seen
    with contextlib.suppress(EOFError):
        while True:
            asked = theirs.recv()
            with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
                command = _FORK.Process(
                    target=_command, args=(*asked, stdout.fileno(), stderr.fileno())
                )
                command.start()
                command.join(time_limit)
                command.kill()
                command.join()
                outputs = []
                for file in (stdout, stderr):
                    file.seek(0)
                    outputs.append(file.read())
            theirs.send((command.exitcode, *outputs))


def _command(arguments: list[str], folder: str, stdout: int, stderr: int) -> None:
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(file, number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    sys.argv = ["torchrec_dyn", *arguments]
    runpy.run_module("torchrec_dyn", run_name="__main__", alter_sys=True)
