// Stores of memory that will not be read soon: the line is not fetched first and no other line leaves the caches for
// it.
#pragma once

#include <cstring>

#include "simd.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace torchrec_dyn {

// `to` lies on a 16-byte boundary.
TORCHREC_DYN_INLINE void store_past_caches(const Floats16& lanes, float* to) {
#if defined(__SSE__)
  __m128 quarters[4];
  std::memcpy(quarters, &lanes, sizeof lanes);
  for (int64_t q = 0; q < 4; ++q) _mm_stream_ps(to + 4 * q, quarters[q]);
#else
  store(lanes, to);
#endif
}

// Such stores are not ordered with others: called by the thread that made them before it says that it is done.
inline void finish_stores_past_caches() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

}  // namespace torchrec_dyn
