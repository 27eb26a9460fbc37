// Coverage of a process: which instructions of which kernels it executed. tests/csrc/ptx/coverage.py adds them up.
//
//   TORCHREC_DYN_PTX_COVERAGE  a folder: the process writes a file there at the end of its tests
#pragma once

// Does nothing without the variable. tests/conftest.py calls it by its name: some processes do not run what is
// registered for their exit.
extern "C" void torchrec_dyn_write_coverage();
