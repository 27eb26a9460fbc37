// The functions of CUDA's driver that the emulated runtime hands out. A library that calls another one gets the answer
// of a driver that is too old for it.
#pragma once

#include <string>

namespace torchrec_dyn::ptx {

// Of virtual memory, and of the context that it needs (virtual_memory.cpp); null for every other name.
void* driver_function(const std::string& name);

}  // namespace torchrec_dyn::ptx
