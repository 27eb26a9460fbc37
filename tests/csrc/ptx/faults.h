// A kernel's access to memory that is not there: an error of the kernel, not the end of the process.
#pragma once

#include "warp.h"

namespace torchrec_dyn::ptx {

// Runs body(argument). Returns false if SIGSEGV or SIGBUS met the access in progress (`state.access`); body was left by
// siglongjmp then, so its frames must own nothing at that moment: memory of the host is touched by memory.cpp and
// atomics.cpp alone, below frames that own nothing.
bool run_guarded(GridState& state, void (*body)(void*), void* argument);

}  // namespace torchrec_dyn::ptx
