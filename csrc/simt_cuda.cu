// What simt.h declares beside `each`, for CUDA: copies, and CUB's algorithms.
#include <cub/device/device_scan.cuh>

#include "simt_cuda.h"

namespace torchrec_dyn::simt {

void exclusive_sum(const Queue& queue, int64_t* words, int64_t n) {
  if (n == 0) return;
  // All types are named: an older CUB, which counts in int, does not compile.
  const auto scan = [&](void* memory, size_t& bytes) {
    check_cuda(cub::DeviceScan::ExclusiveSum<int64_t*, int64_t*, int64_t>(memory, bytes, words, words, n,
                                                                          stream_of(queue)),
               "a scan");
  };
  size_t bytes = 0;
  scan(nullptr, bytes);
  scan(queue.scratch->take(static_cast<int64_t>(bytes)), bytes);
}

void fill_zero(const Queue& queue, void* memory, int64_t bytes) {
  if (bytes > 0) check_cuda(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream_of(queue)), "a fill");
}

void read_back(const Queue& queue, void* host, const void* memory, int64_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(host, memory, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_of(queue)),
             "a copy to the host");
  check_cuda(cudaStreamSynchronize(stream_of(queue)), "a copy to the host");
}

void send(const Queue& queue, void* memory, const void* host, int64_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(memory, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_of(queue)),
             "a copy from the host");
  check_cuda(cudaStreamSynchronize(stream_of(queue)), "a copy from the host");
}

}  // namespace torchrec_dyn::simt
