// The element types a row may have, and how a float gets in and out of each.
//
// Loads are bit tricks that the compiler vectorises without any target flag. Stores come twice: to nearest
// (for values that someone handed in) and stochastic (for updates), where the low bits that do not fit are
// compared with random ones, so that the expected value of the stored number is the number itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace torchrec_dyn {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

// Shifting the half's exponent and mantissa into place gives a float that is 2^-112 too small, subnormals
// included; infinities and NaNs keep an exponent of all ones.
inline float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7FFFu) << 13;
  const uint32_t scaled = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x0F800000u ? (magnitude | 0x7F800000u) : scaled;
  return float_of_bits(sign | special);
}

inline void store_nearest(float value, float* out) { *out = value; }

inline void store_nearest(float value, BFloat16* out) {
  const uint32_t bits = bits_of_float(value);
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);  // half to even
  out->bits = static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded >> 16);
}

// A half's unit in the last place for |value|: 2^(exponent - 10), never below the subnormal step 2^-24.
inline double float16_step(double magnitude) {
  const int exponent = magnitude == 0.0 ? -14 : std::ilogb(magnitude);
  return std::ldexp(1.0, (exponent < -14 ? -14 : exponent) - 10);
}

inline uint16_t float16_bits(bool negative, double whole_steps, double step) {
  const double magnitude = whole_steps * step;
  uint32_t bits;
  if (magnitude >= 65536.0) {
    bits = 0x7C00u;
  } else if (magnitude < 0x1p-14) {
    bits = static_cast<uint32_t>(magnitude * 0x1p24);
  } else {
    const int exponent = std::ilogb(magnitude);
    bits = (static_cast<uint32_t>(exponent + 15) << 10) +
           static_cast<uint32_t>(std::ldexp(magnitude, 10 - exponent) - 1024.0);
  }
  return static_cast<uint16_t>(bits | (negative ? 0x8000u : 0u));
}

inline void store_nearest(float value, Float16* out) {
  if (std::isnan(value)) {
    out->bits = 0x7E00u;
    return;
  }
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 65520.0) {  // halfway between the largest half, 65504, and what would be the next
    out->bits = static_cast<uint16_t>(std::signbit(value) ? 0xFC00u : 0x7C00u);
    return;
  }
  const double step = float16_step(magnitude);
  out->bits = float16_bits(std::signbit(value), std::nearbyint(magnitude / step), step);
}

// `random16`: 16 random bits. A float ignores them.
inline void store_stochastic(float value, uint32_t, float* out) { *out = value; }

inline void store_stochastic(float value, uint32_t random16, BFloat16* out) {
  const uint32_t bits = bits_of_float(value);
  const bool finite = (bits & 0x7F800000u) != 0x7F800000u;
  if (!finite) return store_nearest(value, out);
  out->bits = static_cast<uint16_t>((bits + random16) >> 16);
}

// Finite values past 65504 go to infinity as they do in FBGEMM and torch: an overflow must be seen.
inline void store_stochastic(float value, uint32_t random16, Float16* out) {
  const double magnitude = std::fabs(static_cast<double>(value));
  if (!(magnitude < 65504.0)) return store_nearest(value, out);
  const double step = float16_step(magnitude);
  const double steps = std::floor(magnitude / step + random16 * 0x1p-16);
  out->bits = float16_bits(std::signbit(value), steps, step);
}

}  // namespace torchrec_dyn
