// A range of addresses for one block of rows that grows in place (docs/dev/decisions/0028): addresses for the largest
// block are reserved at first, memory is committed from the begin on, so rows never move. What is not committed must
// not be touched.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace torchrec_dyn {

class AddressRange {
 public:
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  // Gives back memory and addresses. If a kernel may have used them, call it only after is_idle().
  virtual ~AddressRange() = default;

  // Waits for all kernels that may use the range. False while that is impossible: ask again later.
  virtual bool is_idle() = 0;

  void* begin() const { return begin_; }
  int64_t bytes() const { return bytes_; }  // of addresses

  // Commits the first `bytes` bytes of the range, and up to a page more. Throws std::bad_alloc if there is no memory;
  // nothing has changed then.
  void commit(int64_t bytes) {
    if (bytes <= committed_) return;
    committed_ = commit_from(committed_, bytes);
  }

 protected:
  AddressRange() = default;
  // Commits the bytes from `committed`, where a page begins, to `bytes`. Returns the end of the last page.
  virtual int64_t commit_from(int64_t committed, int64_t bytes) = 0;

  void* begin_ = nullptr;
  int64_t bytes_ = 0;
  int64_t committed_ = 0;
};

constexpr int64_t whole_pages(int64_t bytes, int64_t page) { return (bytes + page - 1) / page * page; }

// Finds the stream of this thread on a GPU; false if there is none.
using FindStream = bool (*)(int32_t device, void** stream);

// A range of a GPU, of at least `bytes` bytes of addresses; address_range_cpu.h has the CPU's.
std::unique_ptr<AddressRange> reserve_cuda_addresses(int64_t bytes, int32_t device, FindStream find_stream);
// Memory of the host that a GPU reads and writes by the same addresses, of at least `bytes` bytes, committed at once.
std::unique_ptr<AddressRange> reserve_host_memory(int64_t bytes, int32_t device, FindStream find_stream);

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
