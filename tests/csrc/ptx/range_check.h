// What is known of the memory of the host beside what the processor checks: AddressSanitizer's marks, if the program
// has them, and the registered check (emulator.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchrec_dyn::ptx {

bool has_range_check();
// Null, or what is wrong.
const char* wrong_range(uintptr_t address, size_t bytes, bool is_write);

}  // namespace torchrec_dyn::ptx
