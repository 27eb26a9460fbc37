// Stores of memory that will not be read soon: the line is not fetched first and no other line leaves the caches for
// it.
#pragma once

#include <cstring>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace torchrec_dyn {

// Four floats; `to` lies on a 16-byte boundary.
inline void store_past_caches(const float* from, float* to) {
#if defined(__SSE__)
  _mm_stream_ps(to, _mm_loadu_ps(from));
#else
  std::memcpy(to, from, 4 * sizeof(float));
#endif
}

// Such stores are not ordered with others: called by the thread that made them before it says that it is done.
inline void finish_stores_past_caches() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

}  // namespace torchrec_dyn
