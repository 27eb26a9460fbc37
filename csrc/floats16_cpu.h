// Sixteen floats in the registers of a level of x86-64, and code that is compiled for each level with its registers.
//
// A vector type that is wider than the registers of a level stands in memory there: GCC 12 writes it in parts of one
// size and reads it back in parts of another, and the reads wait for the writes (half of the time of a copied row with
// AVX2). So the kernels are templates over the size of a register.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "simd.h"

namespace torchrec_dyn {

// Every lane is computed on its own, so the bits are the same at every level.
template <int64_t kBytes>
struct Floats16 {
  typedef float Register __attribute__((vector_size(kBytes)));
  static constexpr int64_t kRegisters = kLanes * static_cast<int64_t>(sizeof(float)) / kBytes;
  static constexpr int64_t kFloats = kLanes / kRegisters;  // of a register

  Register registers[kRegisters] = {};

  TORCHREC_DYN_INLINE void load(const float* from) {
    for (int64_t r = 0; r < kRegisters; ++r) std::memcpy(&registers[r], from + r * kFloats, kBytes);
  }
  TORCHREC_DYN_INLINE void store(float* to) const {
    for (int64_t r = 0; r < kRegisters; ++r) std::memcpy(to + r * kFloats, &registers[r], kBytes);
  }
  TORCHREC_DYN_INLINE Floats16& operator+=(const Floats16& other) {
    for (int64_t r = 0; r < kRegisters; ++r) registers[r] += other.registers[r];
    return *this;
  }
  TORCHREC_DYN_INLINE Floats16& operator*=(float factor) {
    for (int64_t r = 0; r < kRegisters; ++r) registers[r] *= factor;
    return *this;
  }
  TORCHREC_DYN_INLINE Floats16& operator/=(float divisor) {
    for (int64_t r = 0; r < kRegisters; ++r) registers[r] /= divisor;
    return *this;
  }
};

// The bytes of a register, as a type.
template <int64_t kSize>
struct RegisterOf {
  static constexpr int64_t kBytes = kSize;
};

#if defined(TORCHREC_DYN_DISPATCH)
#if __GNUC__ >= 12
#define TORCHREC_DYN_LEVEL_OF_64 "x86-64-v4"
#define TORCHREC_DYN_LEVEL_OF_32 "x86-64-v3"
#define TORCHREC_DYN_TARGET(level) __attribute__((target("arch=" level)))
#else
#define TORCHREC_DYN_LEVEL_OF_64 "avx512f"
#define TORCHREC_DYN_LEVEL_OF_32 "avx2"
#define TORCHREC_DYN_TARGET(level) __attribute__((target(level)))
#endif

inline const int64_t register_bytes = __builtin_cpu_supports(TORCHREC_DYN_LEVEL_OF_64)   ? 64
                                      : __builtin_cpu_supports(TORCHREC_DYN_LEVEL_OF_32) ? 32
                                                                                         : 16;

template <typename Work>
TORCHREC_DYN_TARGET(TORCHREC_DYN_LEVEL_OF_64)
auto with_registers_of_64(const Work& work) noexcept {
  return work(RegisterOf<64>{});
}
template <typename Work>
TORCHREC_DYN_TARGET(TORCHREC_DYN_LEVEL_OF_32)
auto with_registers_of_32(const Work& work) noexcept {
  return work(RegisterOf<32>{});
}

// Returns work(RegisterOf<size>{}) as compiled for the level of this machine. `work` is always inlined, and as the
// functions of simd.h it throws and allocates nothing.
template <typename Work>
auto at_level(const Work& work) noexcept {
  if (register_bytes == 64) return with_registers_of_64(work);
  if (register_bytes == 32) return with_registers_of_32(work);
  return work(RegisterOf<16>{});
}
#else
#if defined(TORCHREC_DYN_CLONE)
#define TORCHREC_DYN_NAME(level) TORCHREC_DYN_TEXT(level)
constexpr std::string_view kLevel = TORCHREC_DYN_NAME(TORCHREC_DYN_CLONE);
constexpr int64_t kRegisterBytes = kLevel.ends_with("v4") ? 64 : kLevel.ends_with("v3") ? 32 : 16;
#else
constexpr int64_t kRegisterBytes = 16;
#endif

template <typename Work>
TORCHREC_DYN_SIMD auto at_level(const Work& work) noexcept {
  return work(RegisterOf<kRegisterBytes>{});
}
#endif

}  // namespace torchrec_dyn
