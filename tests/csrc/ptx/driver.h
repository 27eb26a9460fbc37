// The functions of CUDA's driver that the emulated runtime hands out. A library that calls another one gets the answer
// of a driver that is too old for it.
#pragma once

#include <cstdint>
#include <string>

namespace torchrec_dyn::ptx {

// Of virtual memory, and of the context that it needs (virtual_memory.cpp); null for every other name.
void* driver_function(const std::string& name);

// What was not given back, in numbers. Mapped memory counts as a piece.
struct Held {
  int64_t contexts, ranges, pieces;
};
Held held();

}  // namespace torchrec_dyn::ptx
