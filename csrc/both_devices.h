// TORCHREC_DYN_BOTH marks the functions that CPU and CUDA kernels share: layout and arithmetic are written once, and
// give the same bits on both. Such a function must not call functions of the standard library that nvcc has for the
// host only (std::min, std::array, std::countr_zero, ...): setup.py makes such a call an error, since nvcc drops the
// builtins of the host that they consist of, and the scan of any word then gives its width (docs/dev/decisions/0027).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TORCHREC_DYN_BOTH __host__ __device__
#define TORCHREC_DYN_UNROLL _Pragma("unroll")
#else
#define TORCHREC_DYN_BOTH
#define TORCHREC_DYN_UNROLL
#endif

#define TORCHREC_DYN_INLINE inline __attribute__((always_inline))

namespace torchrec_dyn {

template <typename T>
TORCHREC_DYN_BOTH constexpr T lesser_of(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
TORCHREC_DYN_BOTH constexpr T greater_of(T a, T b) {
  return a < b ? b : a;
}

// One instruction. nvcc makes three of the plain product where it can tell from a comparison that a 64-bit `a` is
// small.
TORCHREC_DYN_BOTH inline uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

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
