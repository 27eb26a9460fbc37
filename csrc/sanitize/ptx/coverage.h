// Coverage of a process: which instructions of which kernels it executed. csrc/sanitize/ptx/coverage adds them up.
//
//   TORCHREC_DYN_PTX_COVERAGE  a folder: the process writes a file there when it exits. A process that ends by _exit or
//                              by a signal writes none.
#pragma once

namespace torchrec_dyn::ptx {

void write_coverage_at_exit();

}  // namespace torchrec_dyn::ptx
