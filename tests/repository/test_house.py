"""The rules of the house that a machine can check. A red test here names the rule and the file."""

import ast
import functools
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from another_process import call

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchrec_dyn"
CORE = ROOT / "csrc"

# The rooms from the ground up: a file imports from its own room and from those before it. The files beside
# the rooms are the ground below them.
ROOMS = (
    *("storage", "life", "table", "lookup", "checkpoint_format", "ranks", "state_dict", "modules"),
    *(
        "sharding",
        "distributed",
        "layers",
        "whole_model",
        "migration",
        "tools",
        "checkpoint",
        "planner",
    ),
    *("replicas", "serving"),
)
GROUND = (
    "versions",
    "knobs",
    "name_lists",
    "ops",
    "initializers",
    "row_rules",
    "own_policies",
    "policies",
    "config",
    "optimizers",
    "compilers",
    "string_ids",
)
ENTRANCES = ("__init__", "__main__")  # of the package: above all rooms
KNOWS_TORCHREC = {*ROOMS[ROOMS.index("ranks") :], *ENTRANCES} - {"state_dict"}

SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """A module's name below the package: `ops`, `life.row_life`, `life.__init__`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@functools.cache  # when a test asks: each process of the tests imports this file
def trees() -> dict[str, ast.Module]:
    """The files of the package by their names."""
    return {name_of(path): ast.parse(path.read_text()) for path in SOURCES}


def room_of(name: str) -> str:
    """The room of a module; of one without a room, the module itself."""
    return name.split(".")[0]


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name or '') of every import, of those too that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "write imports of ours in full"
            yield from ((node.module, alias.name) for alias in node.names)
        else:
            yield from imports(node)


@functools.cache
def imports_of_ours(file: str) -> list[tuple[str, str]]:
    """(module below the package, name) of every import of ours; ('ops', '') for the module itself."""
    found = []
    for module, name in imports(trees()[file]):
        if module == "torchrec_dyn" and name:
            found.append((name, ""))
        elif module.startswith("torchrec_dyn."):
            found.append((module.removeprefix("torchrec_dyn."), name))
    return found


def test_every_file_has_a_room():
    assert {room_of(name) for name in trees()} == {*GROUND, *ROOMS, *ENTRANCES}
    assert not [name for name in trees() if name.count(".") > 1], "no rooms within rooms"


def test_imports_run_downwards():
    """From the own room, rooms below and the ground; on the ground from what is named before."""
    order = ["_C", *GROUND, *ROOMS, *ENTRANCES]
    faults = {}
    for name in trees():
        room = room_of(name)
        below = order[: order.index(room) + (room in ROOMS)]
        if above := {room_of(module) for module, _ in imports_of_ours(name)} - {*below}:
            faults[name] = above
    assert not faults


def test_imports_of_a_room_form_no_circle():
    """The files of a room can be read one after the other, each before those that import it."""
    in_circles = []
    for room in ROOMS:
        files = {
            name: trees()[name]
            for name in trees()
            if room_of(name) == room and "__init__" not in name
        }
        unread = {
            name: {*files} & {way for m, n in imports_of_ours(name) for way in (m, f"{m}.{n}")}
            for name, tree in files.items()
        }
        while read := [name for name, needs in unread.items() if not needs & {*unread}]:
            unread = {name: needs for name, needs in unread.items() if name not in read}
        in_circles += sorted(unread)
    assert not in_circles, "in a circle, or above one"


def test_rooms_are_entered_by_the_door():
    """Other rooms are imported by their face, files of the own room by their full name."""
    faults = []
    for name in trees():
        for module, imported in imports_of_ours(name):
            room = room_of(module)
            if room not in ROOMS:
                continue
            if room != room_of(name):
                if module != room:
                    faults.append(f"{name}: import {imported} from torchrec_dyn.{room}")
            elif module == room and f"{room}.{imported}" not in trees():
                faults.append(f"{name}: import {imported} by its file")
    assert not faults


def test_lower_rooms_know_torch_only():
    assert not [
        (name, module)
        for name, tree in trees().items()
        for module, _ in imports(tree)
        if room_of(name) not in KNOWS_TORCHREC
        and module.split(".")[0] in {"torchrec", "fbgemm_gpu"}
    ]


def test_ops_are_spelled_in_one_file():
    spelling = []
    for name, tree in trees().items():
        source = ast.unparse(tree)
        # FBGEMM's kernels for rows of a few bits are no ops of ours.
        if name == "serving.row_format":
            source = source.replace("torch.ops.fbgemm.", "")
        if "torch.ops" in source or "torchrec_dyn._C" in source:
            spelling.append(name)
    assert spelling == ["ops"]


def declared_ops() -> list[str]:
    return re.findall(r'm\.def\(\s*"(\w+)\(', (CORE / "library.cpp").read_text())


def kernels(suffix: str) -> list[str]:
    text = "".join(path.read_text() for path in sorted(CORE.rglob(f"*_{suffix}")))
    return re.findall(r'm\.impl\(TORCHREC_DYN_(?:STRUCT_)?KERNEL\("(\w+)"', text)


# The core has these rooms, in this order; the files beside them are their ground. A plain header is
# for kernels of any device, *_cpu.h for CPU kernels alone, and *_arguments.h checks the tensors of an op.
# *_launch.cu lists the kernels that nvcc compiles (docs/dev/decisions/0027).
CORE_ROOMS = ("storage", "life", "ranks", "lookup")
CORE_TEXTS = {
    path.relative_to(CORE).as_posix(): path.read_text() for path in sorted(CORE.rglob("*.*"))
}
KNOWS_TORCH = {
    "checks.h",
    "device_call.h",
    "kernel.h",
    "output_memory.h",
    "parallel.h",
    "sent_lists.h",
    "struct_kernel.h",
    "lookup/prepared_tables.h",
    "lookup/pooling_cpu.h",
    "storage/collect_new_cpu.h",
    "storage/collect_new_cuda.h",
    "storage/id_map_changes_cpu.h",
    "lookup/pooling_cuda.h",
    "storage/find_rows_cpu.h",
    "storage/initial_writes_cpu.h",
}  # of the ground


def core_includes(path: str) -> tuple[set[str], set[str]]:
    """What a file of the core includes: files of ours, and others."""
    pairs = re.findall(r'^#include ([<"])(.+)[>"]', CORE_TEXTS[path], re.M)
    return {name for mark, name in pairs if mark == '"'}, {
        name for mark, name in pairs if mark == "<"
    }


def of_torch(path: str) -> set[str]:
    """The headers with torch in them that a file of the core includes."""
    ours, others = core_includes(path)
    return ours & KNOWS_TORCH | {name for name in others if name.startswith("torch/")}


def test_includes_run_downwards():
    """Written from csrc: from the own room, rooms named before and the ground."""
    order = ["", *CORE_ROOMS]
    faults = {}
    for path in CORE_TEXTS:
        ours, _ = core_includes(path)
        below = {*order[: order.index(path.rpartition("/")[0]) + 1]}
        above = {name for name in ours if name.rpartition("/")[0] not in below}
        if wrong := above | (ours - CORE_TEXTS.keys()):
            faults[path] = wrong
    assert not faults


def test_shared_headers_are_fit_for_any_device():
    """Without torch; lists on the host are owned by *_arguments.h or *_cpu.h."""
    faults = {}
    for path in CORE_TEXTS:
        if not path.endswith(".h") or path.endswith("_arguments.h") or path in KNOWS_TORCH:
            continue
        ours, others = core_includes(path)
        wrong = of_torch(path) | {name for name in ours if name.endswith("_arguments.h")}
        if not path.endswith("_cpu.h"):
            wrong |= others & {"vector"} | {name for name in ours if name.endswith("_cpu.h")}
        if wrong:
            faults[path] = wrong
    assert not faults


def test_files_of_nvcc_know_no_torch():
    """torch's headers would take most of their time."""
    files = [path for path in CORE_TEXTS if path.endswith(".cu")]
    assert len(files) > 3
    assert not {path: of_torch(path) for path in files if of_torch(path)}


def test_functions_of_several_simd_levels_throw_nothing():
    """GCC ends the process at an exception of such a function (simd.h)."""
    heads = [
        (path, head)
        for path, text in CORE_TEXTS.items()
        for head in re.findall(r"TORCHREC_DYN_SIMD ([^{]*?)\{", text)
    ]
    assert heads and not [(path, head) for path, head in heads if "noexcept" not in head]


def test_kernels_are_in_rooms():
    """A CUDA kernel goes beside its CPU twin, under the same stem."""
    files = [path for path, text in CORE_TEXTS.items() if "m.impl(" in text]
    assert files
    assert not [
        path
        for path in files
        if path.split("/")[0] not in CORE_ROOMS or not path.endswith(("_cpu.cpp", "_cuda.cpp"))
    ]


# A GPU's update marks its rows itself (docs/dev/decisions/0041), and its maps grow at once.
ON_THE_CPU_ONLY = {"mark_new_", "ask_for_rows", "move_slots"}
# A table on the CPU has all rows in one memory (docs/dev/decisions/0051).
ON_GPUS_ONLY = {"cache_rows_", "row_places"}


def test_every_op_has_one_kernel_for_each_device():
    assert sorted(kernels("cpu.cpp")) == sorted({*declared_ops()} - ON_GPUS_ONLY)
    assert sorted(kernels("cuda.cpp")) == sorted({*declared_ops()} - ON_THE_CPU_ONLY)


def test_every_op_has_a_face_a_fake_and_a_sample():
    faces = {
        node.name: [ast.unparse(decorator) for decorator in node.decorator_list]
        for node in trees()["ops"].body
        if isinstance(node, ast.FunctionDef)
    }
    samples = (ROOT / "tests/support/op_samples.py").read_text()
    assert not [op for op in declared_ops() if faces.get(op) != ["_op"]]
    assert not [op for op in declared_ops() if not re.search(rf"\b{op}\b", samples)]


def test_the_version_is_written_once():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    for path in itertools.chain(SOURCES, [ROOT / "setup.py"], CORE.rglob("*.*")):
        assert f'"{version[1]}"' not in path.read_text(errors="ignore"), path


def is_imported_and_cuda_initialized() -> tuple[bool, bool]:
    return "torchrec_dyn" in sys.modules, torch.cuda.is_initialized()


def test_importing_leaves_cuda_alone():
    """In a fork of a process that has imported the package, and done no more."""
    assert call(is_imported_and_cuda_initialized) == (True, False)


def test_tests_import_support_only():
    """No test imports another test. Names are unique, since pytest imports each file by its name."""
    paths = sorted((ROOT / "tests").glob("*/*.py"))
    names = [path.stem for path in paths]
    assert len(names) == len(set(names))
    tests = {path.stem for path in paths if path.parent.name not in ("planted", "support")}
    assert all(name.startswith("test_") for name in tests)
    for path in paths:
        text = path.read_text()
        if re.search(r"\b(from|import)\b.*\btest_", text):  # to parse all files takes 3 s
            imported = {module for module, _ in imports(ast.parse(text))}
            assert not imported & tests, f"{path.name} imports {imported & tests}"
