"""A part of `make ptx` in each run of the tests: the kernels' PTX as nvcc made it, in the emulator of csrc/sanitize/ptx.

The tests run in a process of their own, with the ptx build in the place of the simt build.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from device_ops import LIBRARY

ROOT = Path(__file__).parents[2]
PTX = ROOT / "build/ptx/torchrec_dyn_ptx.abi3.so"
CONTRACTS = {
    "map": "tests/storage/test_id_map_device.py -k 'not 20000'",
    "rows": "tests/ops/test_row_store_ops.py tests/ops/test_pooling_devices.py",
    "update": "tests/ops/test_row_update_devices.py tests/ops/test_row_update_pieces.py",
    "life": "tests/ops/test_oldest_first.py",
}


@pytest.mark.skipif(not PTX.exists(), reason=f"no {PTX.relative_to(ROOT)}: make test builds it with nvcc")
@pytest.mark.skipif(LIBRARY != PTX.parents[1] / "simt/x", reason="another library is tested")
def test_a_part_of_the_contracts_holds():
    pass
