// Address ranges of the CPU, also for the simt build: a touch of what is not committed is a fault.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <new>

#include "storage/address_range.h"

namespace torchrec_dyn {

class CpuAddressRange final : public AddressRange {
 public:
  explicit CpuAddressRange(int64_t bytes) : page_(sysconf(_SC_PAGESIZE)) {
    bytes_ = whole_pages(bytes, page_);
    void* begin =
        mmap(nullptr, static_cast<size_t>(bytes_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) throw std::bad_alloc();
    begin_ = begin;
  }
  ~CpuAddressRange() override { munmap(begin_, static_cast<size_t>(bytes_)); }
  bool is_idle() override { return true; }

 protected:
  int64_t commit_from(int64_t committed, int64_t bytes) override {
    const int64_t end = whole_pages(bytes, page_);
    void* begin = static_cast<char*>(begin_) + committed;
    if (mprotect(begin, static_cast<size_t>(end - committed), PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    return end;
  }

 private:
  int64_t page_;
};

inline std::unique_ptr<AddressRange> reserve_cpu_addresses(int64_t bytes, int32_t, bool) {
  return std::make_unique<CpuAddressRange>(bytes);
}

}  // namespace torchrec_dyn
