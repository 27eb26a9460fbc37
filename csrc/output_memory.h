// Memory of large outputs. The memory of a dropped output is kept for a later output: the system hands out fresh memory
// page by page and zeroes each page, which takes longer than to fill it (half of the forward of one-hot batches,
// measured, docs/performance.md). At most kMostKept bytes are kept in all; the longest unused memory is freed first.
#pragma once

#include <cstdlib>
#include <list>
#include <mutex>
#include <new>

#include "checks.h"
#include "huge_pages.h"

namespace torchrec_dyn {

class OutputMemory {
 public:
  struct Piece {
    void* memory;
    size_t bytes;
  };

  // Returns at least `bytes` (> 0) bytes, on a 2 MiB boundary.
  Piece take(size_t bytes) {
    constexpr auto kPage = static_cast<size_t>(kHugePage);
    const size_t whole = (bytes + kPage - 1) / kPage * kPage;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto piece = kept_.rbegin(); piece != kept_.rend(); ++piece) {
        if (piece->bytes < whole || piece->bytes / 2 > whole) continue;
        const Piece found = *piece;
        kept_.erase(std::next(piece).base());
        kept_bytes_ -= found.bytes;
        return found;
      }
    }
    void* memory = std::aligned_alloc(kPage, whole);
    if (memory == nullptr) throw std::bad_alloc();
    ask_for_huge_pages(memory, static_cast<int64_t>(whole));
    return {memory, whole};
  }

  void give_back(const Piece& piece) {
    std::list<Piece> leaving;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      kept_.push_back(piece);
      kept_bytes_ += piece.bytes;
      while (kept_bytes_ > kMostKept) {
        kept_bytes_ -= kept_.front().bytes;
        leaving.splice(leaving.end(), kept_, kept_.begin());
      }
    }
    for (const Piece& one : leaving) std::free(one.memory);
  }

  // Never destroyed: outputs may outlive the library's other statics.
  static OutputMemory& shared() {
    static auto* memory = new OutputMemory;
    return *memory;
  }

 private:
  static constexpr size_t kMostKept = size_t{256} << 20;
  std::mutex mutex_;
  std::list<Piece> kept_;
  size_t kept_bytes_ = 0;
};

// Returns an output [elements] that is not initialised.
inline Tensor new_output(int64_t elements, ScalarType dtype) {
  constexpr int64_t kLarge = 1 << 20;  // bytes; malloc itself recycles smaller memory
  const int64_t bytes = elements * (dtype == ScalarType::Float ? 4 : 2);
  if (bytes < kLarge) return new_tensor({elements}, dtype);
  const OutputMemory::Piece piece = OutputMemory::shared().take(static_cast<size_t>(bytes));
  const int64_t one = 1;
  return torch::stable::from_blob(piece.memory, {&elements, 1}, {&one, 1}, torch::stable::Device(DeviceType::CPU),
                                  dtype, [piece](void*) { OutputMemory::shared().give_back(piece); });
}

}  // namespace torchrec_dyn
