"""Applies each patch of this folder to a copy of the package, and demands that the tests it names fail.

    python tests/planted/run.py [--part 1/4] [name ...]

The first line of a patch is `# red: <arguments of pytest>`. Without a name all patches are tried, or a part.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))
FAILED = 1  # pytest's exit status if tests have failed; others mean that none could run
TIME_LIMIT = 300.0


def applied(patch: Path, folder: Path, *options: str) -> None:
    subprocess.run(["git", "apply", *options, str(patch)], cwd=folder, check=True)


def fault(patch: Path, folder: Path) -> str:
    """Returns what is wrong with a patch, or nothing if its tests fail in the folder's package."""
    head = patch.read_text().partition("\n")[0]
    if not head.startswith("# red: "):
        return "expected a first line '# red: <arguments of pytest>'"
    arguments = shlex.split(head.removeprefix("# red: "))
    tests = [str(ROOT / word) if word.startswith("tests/") else word for word in arguments]
    settings = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
    ]
    pytest = [str(Path(sys.executable).with_name("pytest")), "-q", "-x", *settings]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_WAIT_POLICY": "passive"}
    applied(patch, folder)
    try:
        # From there: the server of the ranks imports what is in its working directory.
        done = subprocess.run(
            [*pytest, *tests], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=TIME_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"expected failed tests within {TIME_LIMIT:.0f} s"
    finally:
        applied(patch, folder, "--reverse")
    if done.returncode == FAILED:
        return ""
    return f"expected failed tests, got exit status {done.returncode}:\n{done.stdout[-1000:]}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="1/1")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    number, count = map(int, options.part.split("/"))
    chosen = [path for path in PATCHES if path.stem in options.names] or PATCHES[
        number - 1 :: count
    ]
    faults = 0
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(ROOT / "torchrec_dyn", Path(name, "torchrec_dyn"))
        for patch in chosen:
            began = time.monotonic()
            message = fault(patch, Path(name))
            faults += bool(message)
            print(
                f"{patch.stem}: {message or 'red'} ({time.monotonic() - began:.0f} s)", flush=True
            )
    print(f"{len(chosen) - faults} of {len(chosen)} planted bugs are seen")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
