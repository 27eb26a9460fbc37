// What simt.h and device_errors.h declare beside `launch`, for CUDA: copies, the record of errors, and CUB's
// algorithms.
#include <cub/device/device_scan.cuh>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "device_errors.h"
#include "simt_cuda.h"

namespace torchrec_dyn::simt {

namespace {

constexpr int64_t kWord = sizeof(int64_t);

// Words that are arguments of a kernel, of which there are at most 4 KiB. A copy from memory of the host that is not
// pinned would have to wait for all kernels before it.
struct StoreWords {
  int64_t words[480];
  int64_t* to;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const { to[i] = words[i]; }
};

// Zeros when CUDA loads the kernels: each GPU has its own.
__device__ int64_t error_words[kErrorWords];

}  // namespace

void exclusive_sum(const Stream& stream, int64_t* words, int64_t n) {
  if (n == 0) return;
  // All types are named: an older CUB, which counts in int, does not compile.
  const auto scan = [&](void* memory, size_t& bytes) {
    check_cuda(
        cub::DeviceScan::ExclusiveSum<int64_t*, int64_t*, int64_t>(memory, bytes, words, words, n, cuda_stream(stream)),
        "a scan");
  };
  size_t bytes = 0;
  scan(nullptr, bytes);
  scan(stream.workspace->allocate(static_cast<int64_t>(bytes)), bytes);
}

void fill_zero(const Stream& stream, void* memory, int64_t bytes) {
  if (bytes > 0) check_cuda(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), cuda_stream(stream)), "a fill");
}

void copy_to_host(const Stream& stream, void* host, const void* memory, int64_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(host, memory, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, cuda_stream(stream)),
             "a copy to the host");
  check_cuda(cudaStreamSynchronize(cuda_stream(stream)), "a copy to the host");
}

// Pinned memory and an event, which are made once and used again.
struct HostCopy::Memory {
  int64_t* words = nullptr;
  int64_t count = 0;
  int device = 0;
  cudaEvent_t done = nullptr;

  ~Memory() {
    if (done != nullptr) cudaEventDestroy(done);
    cudaFreeHost(words);
  }
};

namespace {

constexpr const char* kCopy = "a copy to the host";

class KeptMemory {
 public:
  HostCopy::Memory* take(int64_t count) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), kCopy);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto place = std::find_if(kept_.begin(), kept_.end(), [&](const auto& memory) {
        return memory->device == device && memory->count >= count;
      });
      if (place != kept_.end()) {
        HostCopy::Memory* const found = place->release();
        kept_.erase(place);
        return found;
      }
    }
    auto fresh = std::make_unique<HostCopy::Memory>();
    fresh->count = std::max<int64_t>(2 * count, 512);
    fresh->device = device;
    void* words = nullptr;
    const auto bytes = static_cast<size_t>(fresh->count) * sizeof(int64_t);
    check_cuda(cudaHostAlloc(&words, bytes, cudaHostAllocPortable), kCopy);
    fresh->words = static_cast<int64_t*>(words);
    check_cuda(cudaEventCreateWithFlags(&fresh->done, cudaEventDisableTiming), kCopy);
    return fresh.release();
  }

  void give_back(HostCopy::Memory* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.emplace_back(memory);
    if (kept_.size() > kMostKept) kept_.erase(kept_.begin());
  }

  // Never destroyed: CUDA may be gone at the end of the process.
  static KeptMemory& shared() {
    static auto* memory = new KeptMemory;
    return *memory;
  }

 private:
  static constexpr size_t kMostKept = 64;
  std::mutex mutex_;
  std::vector<std::unique_ptr<HostCopy::Memory>> kept_;
};

}  // namespace

HostCopy::HostCopy(const Stream& stream, const int64_t* words, int64_t count)
    : memory_(KeptMemory::shared().take(count)) {
  check_cuda(cudaMemcpyAsync(memory_->words, words, static_cast<size_t>(count) * sizeof(int64_t),
                             cudaMemcpyDeviceToHost, cuda_stream(stream)),
             kCopy);
  check_cuda(cudaEventRecord(memory_->done, cuda_stream(stream)), kCopy);
}

HostCopy::~HostCopy() { KeptMemory::shared().give_back(memory_); }

const int64_t* HostCopy::wait() {
  check_cuda(cudaEventSynchronize(memory_->done), kCopy);
  return memory_->words;
}

int64_t* error_record() {
  void* record = nullptr;
  check_cuda(cudaGetSymbolAddress(&record, error_words), "the address of the record of errors");
  return static_cast<int64_t*>(record);
}

void take_error(int64_t (&record)[kErrorWords]) {
  // Twice: a kernel that another thread has launched in between may just be writing the record. A record of zeros is
  // not cleared, which would lose the error of such a kernel.
  for (int look = 0; look < 2; ++look) {
    check_cuda(cudaDeviceSynchronize(), "a wait for all kernels");
    check_cuda(cudaMemcpyFromSymbol(record, error_words, sizeof record), "a copy to the host");
    if (record[0] == 0) return;
  }
  const int64_t none[kErrorWords] = {};
  check_cuda(cudaMemcpyToSymbol(error_words, none, sizeof none), "a copy from the host");
}

void copy_to_device(const Stream& stream, void* memory, const void* host, int64_t bytes) {
  StoreWords part;
  for (int64_t sent = 0, size = 0; sent < bytes; sent += size) {
    size = std::min(bytes - sent, static_cast<int64_t>(sizeof part.words));
    std::memcpy(part.words, static_cast<const char*>(host) + sent, static_cast<size_t>(size));
    part.to = static_cast<int64_t*>(memory) + sent / kWord;
    launch(stream, size / kWord, part);
  }
}

}  // namespace torchrec_dyn::simt
