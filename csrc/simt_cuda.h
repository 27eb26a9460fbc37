// The CUDA build of simt.h, for files *_launch.cu: each TORCHREC_DYN_LAUNCH(Body) compiles one kernel.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "simt.h"

namespace torchrec_dyn::simt {

inline const char* what_to_do(cudaError_t error) {
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return "Build torchrec_dyn with the compute capability of this GPU in TORCH_CUDA_ARCH_LIST.";
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion:
      return "Install a newer driver, or build torchrec_dyn with the nvcc of an older CUDA.";
    case cudaErrorStreamCaptureUnsupported:
      return "Call it outside of the capture of a CUDA graph.";
    default:
      return "An earlier kernel of any library may be the cause; CUDA_LAUNCH_BLOCKING=1 shows it.";
  }
}

inline void check_cuda(cudaError_t error, const char* where) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears it, unless the device is lost
  throw std::runtime_error(std::string("torchrec_dyn: expected ") + where + " to succeed on the GPU, got " +
                           cudaGetErrorString(error) + ". " + what_to_do(error));
}

inline cudaStream_t stream_of(const Queue& queue) { return static_cast<cudaStream_t>(queue.stream); }

constexpr int64_t kThreadsABlock = 256;

template <typename Body>
__global__ void __launch_bounds__(kThreadsABlock) each_turn(int64_t n, const __grid_constant__ Body body) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreadsABlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreadsABlock + threadIdx.x; i < n; i += stride) body(i);
}

template <typename Body>
void each(const Queue& queue, int64_t n, const Body& body) {
  constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
  if (n <= 0) return;
  const int64_t blocks = lesser_of((n + kThreadsABlock - 1) / kThreadsABlock, kMostBlocks);
  each_turn<<<static_cast<unsigned>(blocks), kThreadsABlock, 0, stream_of(queue)>>>(n, body);
  check_cuda(cudaGetLastError(), "a launch");
}

}  // namespace torchrec_dyn::simt

#define TORCHREC_DYN_LAUNCH(Body) \
  template void torchrec_dyn::simt::each<Body>(const torchrec_dyn::simt::Queue&, int64_t, const Body&)
