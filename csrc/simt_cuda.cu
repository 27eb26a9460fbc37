// What simt.h and device_errors.h declare beside `launch`, for CUDA: copies, the record of errors, and CUB's
// algorithms.
#include <cub/device/device_scan.cuh>

#include <algorithm>
#include <cstring>

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
