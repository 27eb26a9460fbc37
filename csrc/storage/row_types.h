// The element types of rows, and their conversions from and to float.
//
// The conversions are arithmetic without branches, which the compiler vectorises at every level. There are two stores:
// to nearest (for values given by a caller) and stochastic (for updates). A stochastic store rounds up or down by
// random bits, so that the expected value of the stored number is the number itself.
#pragma once

#include <cstdint>

#include "both_devices.h"

namespace torchrec_dyn {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

TORCHREC_DYN_BOTH inline float float_of_bits(uint32_t bits) { return same_bits<float>(bits); }

TORCHREC_DYN_BOTH inline uint32_t bits_of_float(float value) { return same_bits<uint32_t>(value); }

// a < b ? one : other, for bits; requires a >= 0 and b >= 0. Uses a mask: with a condition, compilers move the
// arithmetic of an operand into a branch, and do not vectorise it there, since it might trap.
TORCHREC_DYN_BOTH inline uint32_t if_less(int32_t a, int32_t b, uint32_t one, uint32_t other) {
  const auto mask = static_cast<uint32_t>((a - b) >> 31);
  return (one & mask) | (other & ~mask);
}

TORCHREC_DYN_BOTH inline float to_float(float value) { return value; }

TORCHREC_DYN_BOTH inline float to_float(BFloat16 value) {
  return float_of_bits(static_cast<uint32_t>(value.bits) << 16);
}

// `raised` is the half shifted into place, with 224 added to its exponent. For a normal half it is 2^112 times too
// large; infinities and NaNs stay infinities and NaNs. For a subnormal half v, `normal` is v / 2 + 2^-15, so
// `subnormal`, which is twice that less 2^-14, is v, and it is the smaller number. No float here is subnormal:
// processors are slow with subnormal numbers.
TORCHREC_DYN_BOTH inline float to_float(Float16 value) {
  const auto extended = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(value.bits)));
  const float raised = float_of_bits(((extended << 13) & 0x0FFFE000u) | 0x70000000u);
  const float normal = raised * 0x1p-112f;
  const float subnormal = raised * 0x1p-111f - 0x1p-14f;
  const auto magnitude = static_cast<uint32_t>(
      lesser_of(static_cast<int32_t>(bits_of_float(subnormal)), static_cast<int32_t>(bits_of_float(normal))));
  return float_of_bits((extended & 0x80000000u) | magnitude);
}

TORCHREC_DYN_BOTH inline void store_nearest(float value, float* out) { *out = value; }

TORCHREC_DYN_BOTH inline void store_nearest(float value, BFloat16* out) {
  const uint32_t bits = bits_of_float(value);
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);  // half to even
  out->bits = static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded >> 16);
}

// Magnitudes of floats, as bits, at which the form of a half changes.
constexpr int32_t kHalfNormal = 0x38800000;    // 2^-14: below are the half's subnormals, 2^-24 apart
constexpr int32_t kHalfLargest = 0x477FE000;   // 65504
constexpr int32_t kHalfInfinity = 0x477FF000;  // 65520: halfway from 65504 to 65536, which no half can hold
constexpr int32_t kFloatInfinity = 0x7F800000;
// The difference of the exponent biases of float and half, shifted to the exponent of a half.
constexpr int32_t kHalfBias = 112 << 10;

TORCHREC_DYN_BOTH inline void store_nearest(float value, Float16* out) {
  const uint32_t bits = bits_of_float(value);
  const auto magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  // Half to even. Unsigned: with the largest NaNs the sum is no int32.
  const uint32_t normal = (((bits & 0x7FFFFFFFu) + 0xFFFu + ((bits >> 13) & 1u)) >> 13) - kHalfBias;
  // The floats from 0.5 to 1 are 2^-24 apart too, so the sum rounds as a subnormal half does.
  const float small = float_of_bits(static_cast<uint32_t>(magnitude < kHalfNormal ? magnitude : kHalfNormal));
  const uint32_t subnormal = bits_of_float(small + 0.5f) - bits_of_float(0.5f);
  const uint32_t finite = if_less(magnitude, kHalfNormal, subnormal, normal);
  const uint32_t rounded = ((bits >> 16) & 0x8000u) | if_less(magnitude, kHalfInfinity, finite, 0x7C00u);
  out->bits = static_cast<uint16_t>(if_less(kFloatInfinity, magnitude, 0x7E00u, rounded));
}

// `random16`: 16 random bits.
TORCHREC_DYN_BOTH inline void store_stochastic(float value, uint32_t random16, BFloat16* out) {
  const uint32_t bits = bits_of_float(value);
  const bool is_nan = static_cast<int32_t>(bits & 0x7FFFFFFFu) > kFloatInfinity;
  out->bits = static_cast<uint16_t>(is_nan ? 0x7FC0u : (bits + random16) >> 16);  // an infinity stays
}

// `raised` is twice the magnitude, or for a subnormal half the magnitude plus 2^-14. 13 of its bits do not fit; for a
// subnormal half, `raised` is rounded to the nearest 2^-37.
TORCHREC_DYN_BOTH inline int32_t raised_for_half(int32_t magnitude) {
  const float number = float_of_bits(static_cast<uint32_t>(magnitude));
  return greater_of(static_cast<int32_t>(bits_of_float(number + 0x1p-14f)),
                    static_cast<int32_t>(bits_of_float(number + number)));
}
constexpr int32_t kRaisedBias = kHalfBias + 0x400;

// Finite values from 65520 on become infinity, as in FBGEMM and torch, so that an overflow is seen; values between
// 65504 and 65520 become 65504.
TORCHREC_DYN_BOTH inline void store_stochastic(float value, uint32_t random16, Float16* out) {
  const uint32_t bits = bits_of_float(value);
  const auto magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  const int32_t kept = lesser_of(raised_for_half(magnitude), kHalfLargest + (1 << 23));
  const int32_t finite = ((kept + static_cast<int32_t>(random16 >> 3)) >> 13) - kRaisedBias;
  const int32_t past = (kHalfInfinity - 1 - magnitude) >> 31;  // -1: 0x7BFF + 1 is infinity
  const auto high = static_cast<int16_t>(bits >> 16);
  const auto quiet = static_cast<int16_t>(static_cast<int16_t>(0x7F80 - (high & 0x7FFF)) >> 15);  // of a NaN
  out->bits = static_cast<uint16_t>((high & 0x8000) | (finite - past) | (quiet & 0x200));
}

// The same for a value below 65504 in magnitude: half of the instructions.
TORCHREC_DYN_BOTH inline void store_stochastic_small(float value, uint32_t random16, Float16* out) {
  const uint32_t bits = bits_of_float(value);
  const int32_t raised = raised_for_half(static_cast<int32_t>(bits & 0x7FFFFFFFu));
  const int32_t finite = ((raised + static_cast<int32_t>(random16 >> 3)) >> 13) - kRaisedBias;
  out->bits = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | static_cast<uint32_t>(finite));
}

}  // namespace torchrec_dyn
