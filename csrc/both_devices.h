// TORCHREC_DYN_BOTH marks the functions that CPU and CUDA kernels share: layout and arithmetic are written once, and
// give the same bits on both. Such a function must not call functions of the standard library that nvcc has for the
// host only (std::min, std::array, std::countr_zero, ...): setup.py makes such a call an error.
#pragma once

#if defined(__CUDACC__)
#define TORCHREC_DYN_BOTH __host__ __device__
#else
#define TORCHREC_DYN_BOTH
#endif

namespace torchrec_dyn {

template <typename T>
TORCHREC_DYN_BOTH constexpr T lesser_of(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
TORCHREC_DYN_BOTH constexpr T greater_of(T a, T b) {
  return a < b ? b : a;
}

}  // namespace torchrec_dyn
