// Functions marked TORCHREC_DYN_SIMD are compiled for several x86-64 levels; the level is chosen when the library is
// loaded, so one wheel runs on any machine. The build turns floating-point contraction off, so every level gives the
// same bits. On other machines the compiler's baseline is used (on aarch64 it has 128-bit vectors).
//
// Such a function is noexcept and allocates nothing: GCC takes a call that chooses a level for a call that cannot
// throw, so an exception would end the process.
#pragma once

#include <cstdint>
#include <cstring>

#include "both_devices.h"

#if defined(TORCHREC_DYN_CLONE)  // one level alone, whatever the machine: tests/csrc/clones
#define TORCHREC_DYN_TEXT(name) #name
#define TORCHREC_DYN_ARCH(level) "arch=" TORCHREC_DYN_TEXT(level)
#define TORCHREC_DYN_SIMD __attribute__((target(TORCHREC_DYN_ARCH(TORCHREC_DYN_CLONE))))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TORCHREC_DYN_DISPATCH  // the level of a function may also be chosen at run time, by a branch
#if __GNUC__ >= 12
#define TORCHREC_DYN_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // GCC 11 (Ubuntu 22.04) has no dispatcher for levels
#define TORCHREC_DYN_SIMD __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define TORCHREC_DYN_SIMD
#endif

namespace torchrec_dyn {

constexpr int64_t kLanes = 16;  // floats that are computed together: a register of 512 bits

// The upper half is added to the lower half: this gives eight sums, then four, two, one.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float sum_of_lanes(const float (&lanes)[kLanes]) {
#if defined(__CUDACC__)
  float sums[4];
  for (int64_t i = 0; i < 4; ++i) sums[i] = (lanes[i] + lanes[i + 8]) + (lanes[i + 4] + lanes[i + 12]);
#else  // with vectors, since compilers would extract the sixteen numbers one by one
  typedef float Floats4 __attribute__((vector_size(16)));
  Floats4 quarters[4];
  std::memcpy(quarters, lanes, sizeof lanes);
  const Floats4 sums = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
#endif
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

}  // namespace torchrec_dyn
