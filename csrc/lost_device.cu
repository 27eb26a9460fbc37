// simt::raise_lost_device for CUDA.
#include <cuda_runtime_api.h>

#include "cuda_errors.h"
#include "device_errors.h"

namespace torchrec_dyn::simt {

// The error of torch's call is not known here: torch has a CUDA runtime of its own, and so has the extension. A GPU
// whose kernel has failed returns that error from every call, so a call is made that changes nothing and that a capture
// of a CUDA graph allows.
void raise_lost_device() {
  size_t left = 0, whole = 0;
  const cudaError_t error = cudaMemGetInfo(&left, &whole);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return;
  }
  check_cuda(error, "an allocation");
}

}  // namespace torchrec_dyn::simt
