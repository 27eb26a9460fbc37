// The functions of CUDA's driver that the emulated runtime hands out. A library that calls another one gets the answer
// of a driver that is too old for it.
#pragma once

#include <cstdint>
#include <string>

namespace torchrec_dyn::ptx {

// Of virtual memory, of memory of the host, and of the context that both need (virtual_memory.cpp); null for every
// other name.
void* driver_function(const std::string& name);

// What was not given back, in numbers. Mapped memory, and memory of the host, counts as a piece.
struct Held {
  int64_t contexts, ranges, pieces;
};
Held held();

}  // namespace torchrec_dyn::ptx
