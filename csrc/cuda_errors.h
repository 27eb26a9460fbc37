// Errors of the CUDA runtime, for files *.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

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

}  // namespace torchrec_dyn::simt
