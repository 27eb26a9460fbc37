// Sixteen elements of a row, of any row type, as floats. In vectors from end to end: by way of an array the compiler
// stores narrower vectors than it then loads, and waits for them.
#pragma once

#include "row_types.h"
#include "simd.h"

namespace torchrec_dyn {

typedef uint16_t Shorts16 __attribute__((vector_size(32)));
typedef uint32_t Words16 __attribute__((vector_size(64)));

TORCHREC_DYN_INLINE void load_row(const float* row, Floats16& lanes) { load(row, lanes); }

TORCHREC_DYN_INLINE void load_row(const BFloat16* row, Floats16& lanes) {
  Shorts16 shorts;
  std::memcpy(&shorts, row, sizeof shorts);
  const Words16 bits = __builtin_convertvector(shorts, Words16) << 16;
  std::memcpy(&lanes, &bits, sizeof lanes);
}

// As to_float in row_types.h.
TORCHREC_DYN_INLINE void load_row(const Float16* row, Floats16& lanes) {
  Shorts16 shorts;
  std::memcpy(&shorts, row, sizeof shorts);
  const Words16 wide = __builtin_convertvector(shorts, Words16);
  const Words16 magnitude = (wide & 0x7FFFu) << 13;
  Floats16 scaled;
  std::memcpy(&scaled, &magnitude, sizeof scaled);
  scaled *= 0x1p112f;
  Words16 bits;
  std::memcpy(&bits, &scaled, sizeof bits);
  const Words16 is_special = (Words16)(magnitude >= 0x0F800000u);  // all ones for infinities and NaNs
  bits = (is_special & (magnitude | 0x7F800000u)) | (~is_special & bits) | (wide & 0x8000u) << 16;
  std::memcpy(&lanes, &bits, sizeof lanes);
}

}  // namespace torchrec_dyn
