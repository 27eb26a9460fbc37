// Memory of large outputs. The memory of a dropped output is kept for a later output: the system hands out fresh memory
// page by page and zeroes each page, which takes longer than to fill it (half of the forward of one-hot batches,
// measured, docs/dev/performance.md). At most kMostKept bytes are kept in all, and always the memory dropped last,
// whatever its size: a step whose output is larger would pay for fresh memory each time. The longest unused memory is
// freed first.
#pragma once

#include <cstdlib>
#include <list>
#include <mutex>
#include <new>
#include <optional>

#include "checks.h"
#include "huge_pages.h"

namespace torchrec_dyn {

class OutputMemory {
  struct Memory {
    void* begin;
    size_t bytes;
  };

 public:
  // A place in the list of pieces in use: to give a piece back allocates nothing.
  using Piece = std::list<Memory>::iterator;

  // Returns at least `bytes` (> 0) bytes: whole pages of 2 MiB, or of 64 KiB if one of 2 MiB would not be filled.
  Piece take(size_t bytes) {
    const auto page = bytes < static_cast<size_t>(kHugePage) ? size_t{64} << 10 : static_cast<size_t>(kHugePage);
    const size_t whole = (bytes + page - 1) / page * page;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto piece = kept_.end(); piece != kept_.begin();) {
        --piece;
        if (piece->bytes < whole || piece->bytes / 2 > whole) continue;
        kept_bytes_ -= piece->bytes;
        used_.splice(used_.begin(), kept_, piece);
        return piece;
      }
    }
    std::list<Memory> fresh{Memory{nullptr, whole}};
    void* memory = std::aligned_alloc(page, whole);
    if (memory == nullptr) throw std::bad_alloc();
    fresh.front().begin = memory;
    ask_for_huge_pages(memory, static_cast<int64_t>(whole));
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.splice(used_.begin(), fresh);
    return used_.begin();
  }

  void give_back(const Piece& piece) {
    std::list<Memory> leaving;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      kept_.splice(kept_.end(), used_, piece);
      kept_bytes_ += piece->bytes;
      while (kept_bytes_ > kMostKept && kept_.size() > 1) {
        kept_bytes_ -= kept_.front().bytes;
        leaving.splice(leaving.end(), kept_, kept_.begin());
      }
    }
    for (const Memory& one : leaving) std::free(one.begin);
  }

  // Never destroyed: outputs may outlive the library's other statics.
  static OutputMemory& shared() {
    static auto* memory = new OutputMemory;
    return *memory;
  }

 private:
  static constexpr size_t kMostKept = size_t{256} << 20;
  std::mutex mutex_;
  std::list<Memory> kept_;
  std::list<Memory> used_;
  size_t kept_bytes_ = 0;
};

// Returns an output [rows, columns] that is not initialised; [rows] if `columns` is left out.
inline Tensor new_output(int64_t rows, ScalarType dtype, std::optional<int64_t> columns = std::nullopt) {
  // Bytes; malloc itself recycles smaller memory, unless a step drops many at once: then it gives them back to the
  // system (eight of 950 KB: half of the time of a read was page faults).
  constexpr int64_t kLarge = 1 << 18;
  constexpr int64_t kMostMemory = int64_t{1} << 60;  // more than any machine has; larger numbers overflow
  const int64_t row_bytes = columns.value_or(1) * (dtype == ScalarType::Float ? 4 : 2);
  const int64_t sizes[] = {rows, columns.value_or(1)}, strides[] = {columns.value_or(1), 1};
  const size_t dimensions = columns ? 2 : 1;
  if (rows > kMostMemory / row_bytes) throw std::bad_alloc();
  if (rows * row_bytes < kLarge) return new_tensor({sizes, dimensions}, dtype);
  const OutputMemory::Piece piece = OutputMemory::shared().take(static_cast<size_t>(rows * row_bytes));
  return tensor_of(piece->begin, {sizes, dimensions}, {strides, dimensions}, dtype,
                   [piece] { OutputMemory::shared().give_back(piece); });
}

}  // namespace torchrec_dyn
