// Bits of words, for kernels of any device. In device code the functions of <bit> must not be called: nvcc drops the
// builtins of the host that they consist of, and the scan of any word then gives its width (docs/decisions/0027).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace torchrec_dyn {

// The number of the lowest bit that is set. Requires bits != 0.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE int lowest_bit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return std::countr_zero(bits);
#endif
}

// The number of another type with the same bits.
template <typename To, typename From>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace torchrec_dyn
