"""The part of `make ptx` that each run of the tests has: contracts of ops on the kernels of nvcc.

They run in a process of their own, in which the ptx build stands for the simt build (tests/csrc/ptx): a
fork, which has the imports.
"""

import os
import re
from pathlib import Path

import pytest
from forked import run_ranks

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build/ptx/torchrec_dyn_ptx.abi3.so"
CHOSEN = [
    *("tests/storage/test_id_map_device.py", "tests/storage/test_growing_blocks.py"),
    *("tests/ops/test_pooling_devices.py", "tests/ops/test_row_update_pieces.py"),
    "tests/ops/test_row_lists.py",
]
# Few rows; and of five long runs, 70,000 ids each, that of mean and weights, and that of senders.
LONG = "long_runs and (False-False-False or True-False-False or False-True-True)"
FEW = ["-k", f"not twenty and not 20000 and not ({LONG})"]


def run_tests(environment: dict[str, str]) -> None:
    """Runs the chosen tests; ends this process, which has loaded no kernels, with pytest's status."""
    os.chdir(ROOT)
    os.environ.update(environment)
    options = ["-q", "-p", "no:cacheprovider", "--simt"]
    raise SystemExit(int(pytest.main([*options, *CHOSEN, *FEW])))


@pytest.mark.skipif(not LIBRARY.exists(), reason="no build/ptx: `make test` builds it, with nvcc")
@pytest.mark.skipif("TORCHREC_DYN_SIMT_LIBRARY" in os.environ, reason="tests of another library")
def test_contracts_hold_on_the_ptx_of_nvcc(tmp_path):
    report = tmp_path / "report"
    environment = {
        "TORCHREC_DYN_SIMT_LIBRARY": str(LIBRARY),
        "TORCHREC_DYN_PTX_REPORT": str(report),
        "CI": "1",
    }
    ended = run_ranks(run_tests, environment, time_limit=600.0)
    assert ended.codes == [0], ended.stdout[-4000:] + ended.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) >= 50
    assert not report.exists(), report.read_text()
