"""Runs PTX that tests write, in the emulator of tests/csrc/ptx. Needs a C++ compiler, no nvcc and no GPU.

Program(text).launch("kernel", grid=1, block=32, arguments=[array, 7])
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests/csrc/ptx"
BUILT = ROOT / "build/ptx/tests"
FLAGS = ["-shared", "-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
SCHEDULES = ("converged", "random", "split")


@functools.cache
def library():
    BUILT.mkdir(parents=True, exist_ok=True)
    with Path(BUILT, "lock").open("w") as lock:  # of two processes the second finds it built
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = _built()
    loaded = ctypes.CDLL(str(built))
    loaded.ptx_parse.restype = ctypes.c_void_p
    loaded.ptx_text.restype = loaded.ptx_unsupported.restype = ctypes.c_char_p
    return loaded


def _built():
    """Returns the file of the emulator, compiled if there is none of this text and these flags."""
    # The stand-ins for CUDA need its headers. One file that includes the others takes a third of the time.
    parts = [
        path for path in sorted(SOURCES.glob("*.cpp")) if "#include <cuda" not in path.read_text()
    ]
    text = "".join(f'#include "{path}"\n' for path in parts)
    read = [path.read_bytes() for path in (*parts, *sorted(SOURCES.glob("*.h")))]
    key = hashlib.sha256(b"".join([text.encode(), " ".join(FLAGS).encode(), *read])).hexdigest()
    built = BUILT / f"{key[:16]}.so"
    if not built.exists():
        for older in BUILT.glob("*.so"):
            older.unlink()
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            source, made = Path(folder, "emulator.cpp"), Path(folder, "it.so")
            source.write_text(text)
            subprocess.run(["g++", *FLAGS, str(source), "-o", str(made), "-lpthread"], check=True)
            made.replace(built)
    return built


class Launched(NamedTuple):
    error: int  # of CUDA; 0: none
    report: str  # what the emulator said


class Program:
    """A module of PTX. The head is added to a text without one."""

    def __init__(self, text):
        text = text if ".version" in text else HEAD + text
        self._module = ctypes.c_void_p(library().ptx_parse(text.encode()))
        if not self._module:
            raise ValueError(library().ptx_text().decode())

    def __del__(self):
        if getattr(self, "_module", None):
            library().ptx_free(self._module)

    def launch(self, name, grid=1, block=32, arguments=(), shared_bytes=0, **environment):
        """Runs a kernel. Arrays are passed by address, int as 64 bits, numbers of numpy as they are.

        environment: SCHEDULE, SEED, RACES, STEPS of tests/csrc/ptx/emulator.h.
        """
        given = [
            np.uint64(one.ctypes.data) if isinstance(one, np.ndarray) else one for one in arguments
        ]
        given = [np.uint64(one % (1 << 64)) if isinstance(one, int) else one for one in given]
        memory = [np.array([one]) for one in given]
        pointers = (ctypes.c_void_p * max(len(memory), 1))(*(one.ctypes.data for one in memory))
        extents = (ctypes.c_uint * 6)(*_extent(grid), *_extent(block))
        with tempfile.NamedTemporaryFile() as report:
            names = {f"TORCHREC_DYN_PTX_{key}": str(value) for key, value in environment.items()}
            names["TORCHREC_DYN_PTX_REPORT"] = report.name
            with mock.patch.dict(os.environ, names):
                size = ctypes.c_size_t(shared_bytes)
                error = library().ptx_launch(self._module, name.encode(), extents, pointers, size)
            return Launched(error, Path(report.name).read_text())

    def run(self, name, *args, **kwargs):
        """As launch; an error is not expected."""
        launched = self.launch(name, *args, **kwargs)
        assert launched == (0, ""), launched

    def unsupported(self):
        return library().ptx_unsupported(self._module).decode().splitlines()


def _extent(size):
    return (size, 1, 1) if isinstance(size, int) else (*size, 1, 1)[:3]


def refuse_range(begin, end):
    """Makes accesses within [begin, end) errors; an empty range ends it."""
    library().ptx_refuse_range(ctypes.c_size_t(begin), ctypes.c_size_t(end))


def kernel(body, parameters=("out",), registers=(), name="kernel"):
    """Returns the text of a kernel; its parameters are 64-bit registers, %out and so on, %i the thread."""
    declared = ", ".join(f".param .u64 p_{one}" for one in parameters)
    loads = "".join(f".reg .b64 %{one};\nld.param.u64 %{one}, [p_{one}];\n" for one in parameters)
    rest = "".join(f".reg .{one};\n" for one in registers)
    lines = body.splitlines()
    memory = [line for line in lines if line.startswith((".shared", ".local"))]
    rest += "".join(f"{line}\n" for line in memory)
    body = "\n".join(line for line in lines if line not in memory)
    return f""".visible .entry {name}({declared})
{{
{rest}{loads}.reg .b32 %i, %block_, %size_;
mov.u32 %i, %tid.x;
mov.u32 %block_, %ctaid.x;
mov.u32 %size_, %ntid.x;
mad.lo.s32 %i, %block_, %size_, %i;
{body}
ret;
}}
"""
