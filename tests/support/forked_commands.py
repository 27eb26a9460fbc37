"""Runs `python -m torchrec_dyn ...` for a program in 0.1 s: by forks of a process that has the imports.

A new interpreter would take 3 s for these imports. What a new interpreter does with such a command is tested
by tests/tools/test_inspect.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

_FORK = multiprocessing.get_context("fork")
_OURS = [sys.executable, "-m", "torchrec_dyn"]


@contextlib.contextmanager
def forked_commands(time_limit: float) -> Iterator[None]:
    """Has subprocess.run take our commands to forks of this process, as it is now."""
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
