// A range of addresses for one block of rows that grows in place (docs/decisions/0028): addresses for the largest block
// are reserved at first, memory is committed from the begin on, so rows never move. What is not committed must not be
// touched.
#pragma once

#include <cstdint>
#include <memory>

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

}  // namespace torchrec_dyn
