"""Each planted bug of tests/planted still applies; `make planted` shows that tests see it."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "tests/planted").glob("*.patch"))


def test_every_patch_applies_and_names_its_tests() -> None:
    assert len(PATCHES) >= 50
    check = ["git", "apply", "--check"]
    faults = {
        patch.stem: done.stderr
        for patch in PATCHES
        if (
            done := subprocess.run([*check, patch], cwd=ROOT, capture_output=True, text=True)
        ).returncode
        or not patch.read_text().startswith("# red: tests/")
    }
    assert not faults
