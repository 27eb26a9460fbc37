// Which tensors use a range of addresses, and when the range is given back.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "storage/address_range.h"

namespace torchrec_dyn {

// The ranges in use, by their address. A range lives as long as a tensor over it, and until its kernels have run.
class GrowingBlocks {
  struct Use {
    std::unique_ptr<AddressRange> range;
    int64_t tensors;
  };
  using Uses = std::map<void*, Use>;

 public:
  // Makes the first `bytes` bytes of the range that begins at `begin` usable. Returns false if no range begins there,
  // or if its addresses do not suffice. For each true, call give_back once.
  bool extend(void* begin, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = used_.find(begin);
    if (place == used_.end() || place->second.range->bytes() < bytes) return false;
    place->second.range->commit(bytes);
    ++place->second.tensors;
    return true;
  }

  // Returns the begin of a new range, with its first `bytes` bytes usable. Call give_back once.
  void* add(std::unique_ptr<AddressRange> range, int64_t bytes) {
    range->commit(bytes);
    void* begin = range->begin();
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.emplace(begin, Use{std::move(range), 1});
    return begin;
  }

  // Allocates nothing: a tensor calls it when it is dropped.
  void give_back(void* begin) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto place = used_.find(begin);
      if (--place->second.tensors > 0) return;
      left_.insert(used_.extract(place));
    }
    free_left();
  }

  // Frees the ranges that no tensor uses, but those whose kernels cannot be waited for now: they stay for a later call.
  void free_left() {
    Uses leaving;  // waited for and freed without the lock
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      leaving.swap(left_);
    }
    std::erase_if(leaving, [](const auto& use) { return use.second.range->is_idle(); });
    if (leaving.empty()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    left_.merge(leaving);
  }

  // Never destroyed: tensors may outlive the library's other statics.
  static GrowingBlocks& shared() {
    static auto* blocks = new GrowingBlocks;
    return *blocks;
  }

 private:
  std::mutex mutex_;
  Uses used_;
  Uses left_;
};

}  // namespace torchrec_dyn
