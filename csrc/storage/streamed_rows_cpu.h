// Writes of rows past the caches. An ordinary write reads the line first; a streamed one does not, which takes half of
// the time where rows are not in the caches (a prefetch does not help: benchmarks/DEAD_ENDS.md).
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace torchrec_dyn {

constexpr int64_t kLineBytes = 64;

// Writes rows of whole cache lines past the caches, and other rows as usual. The memory is seen by other threads after
// this object's end.
class RowStream {
 public:
  // `bytes`: of all rows. Few rows may be read again before they leave the caches.
  explicit RowStream(int64_t bytes) : is_large_(bytes >= kLeastBytes) {}
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;
  ~RowStream() {
#if defined(__SSE2__)
    if (is_large_) _mm_sfence();
#endif
  }

  template <typename T>
  void write(const T* from, int64_t columns, T* to) const {
#if defined(__SSE2__)
    const int64_t bytes = columns * static_cast<int64_t>(sizeof(T));
    if (is_large_ && bytes % kLineBytes == 0 && reinterpret_cast<uintptr_t>(to) % kLineBytes == 0) {
      const auto* unit = reinterpret_cast<const __m128i*>(from);
      auto* out = reinterpret_cast<__m128i*>(to);
      for (const auto* end = unit + bytes / static_cast<int64_t>(sizeof(__m128i)); unit < end; ++unit, ++out)
        _mm_stream_si128(out, _mm_loadu_si128(unit));
      return;
    }
#endif
    std::copy(from, from + columns, to);
  }

 private:
  static constexpr int64_t kLeastBytes = 1 << 19;
  bool is_large_;
};

}  // namespace torchrec_dyn
