#include "range_check.h"

#include <atomic>

#include "emulator.h"

// Of AddressSanitizer's run-time library; null in a program without it.
extern "C" void* __asan_region_is_poisoned(void* begin, size_t bytes) __attribute__((weak));

namespace torchrec_dyn::ptx {
namespace {

constinit std::atomic<RangeCheck> registered{nullptr};

}  // namespace

void set_range_check(RangeCheck check) { registered = check; }

bool has_range_check() { return registered != nullptr || __asan_region_is_poisoned != nullptr; }

const char* wrong_range(uintptr_t address, size_t bytes, bool is_write) {
  if (__asan_region_is_poisoned != nullptr &&
      __asan_region_is_poisoned(reinterpret_cast<void*>(address), bytes) != nullptr)
    return "outside of allocated memory (AddressSanitizer)";
  const RangeCheck check = registered;
  return check == nullptr ? nullptr : check(address, bytes, is_write);
}

}  // namespace torchrec_dyn::ptx
