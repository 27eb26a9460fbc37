// The functions of the CUDA runtime that the host half and CUB call, on one emulated GPU: kernels go to the emulator,
// the memory of the GPU is the host's, and everything has run when a call returns. A function that is not here is an
// error of the linker (setup.py): give it its few lines, as strict as its documentation, and count it below if the
// host waits in it.
//
// Environment, read at each launch:
//   TORCHREC_DYN_PTX_BLOCKS  the most blocks of a launch of run_threads (simt_cuda.h): its threads take second items
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "emulator.h"
#include "fat_binaries.h"

// How often the host of a GPU would have waited for it: tests/support/mock_device.py reads it by its name.
extern "C" {
[[gnu::used, gnu::visibility("default")]] std::atomic<int64_t> torchrec_dyn_host_waits{0};
// Not 0: as a GPU that runs no more kernels. Tests set it by its name.
[[gnu::used, gnu::visibility("default")]] std::atomic<int64_t> torchrec_dyn_lost_device{0};
}

namespace torchrec_dyn::ptx {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

// What a function of the runtime returns: an error is also kept for cudaGetLastError.
cudaError_t ended(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// Of <<<...>>>, from its begin to the launch.
struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

// run_threads serves its items with any number of blocks; run_tiles needs a tile for each item.
dim3 with_fewer_blocks(const Kernel& kernel, dim3 grid) {
  const char* most = std::getenv("TORCHREC_DYN_PTX_BLOCKS");
  if (most == nullptr) return grid;
  const std::string name = facts(kernel).name;
  const bool is_ours =
      name.find("torchrec_dyn4simt") != std::string::npos && name.find("run_threads") != std::string::npos;
  if (is_ours) grid.x = std::min(grid.x, static_cast<unsigned>(std::max(1, std::atoi(most))));
  return grid;
}

cudaError_t launch_kernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                          cudaStream_t stream) {
  Kernel* kernel = FatBinaries::shared().kernel(stub);
  if (kernel == nullptr) return ended(cudaErrorInvalidDeviceFunction);
  if (stream != nullptr) return ended(cudaErrorInvalidResourceHandle);
  grid = with_fewer_blocks(*kernel, grid);
  const Launch one{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, arguments, shared_bytes};
  return ended(static_cast<cudaError_t>(launch(*kernel, one)));
}

// `bytes` bytes of a variable of the GPU, from `offset` on; null if it does not have them.
char* part_of_variable(const void* shadow, size_t bytes, size_t offset) {
  const Variable* variable = FatBinaries::shared().variable(shadow);
  const bool has_them = variable != nullptr && offset <= variable->bytes && bytes <= variable->bytes - offset;
  return has_them ? static_cast<char*>(variable->memory) + offset : nullptr;
}

// The numbers are an A100's, but for the few processors: what CUB launches grows with them. -1: not known here.
int attribute_of(cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      return FatBinaries::shared().compute_capability() / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return FatBinaries::shared().compute_capability() % 10;
    case cudaDevAttrMultiProcessorCount:
      return 4;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 163 << 10;
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrL2CacheSize:
      return 40 << 20;
    default:
      return -1;
  }
}

}  // namespace
}  // namespace torchrec_dyn::ptx

using namespace torchrec_dyn::ptx;

extern "C" {

// ---- what nvcc's code of the host calls: no header of CUDA declares these

void** __cudaRegisterFatBinary(void* wrapper) { return reinterpret_cast<void**>(FatBinaries::shared().add(wrapper)); }

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}  // the process ends

void __cudaRegisterFunction(void** binary, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  FatBinaries::shared().name_kernel(stub, reinterpret_cast<FatBinary*>(binary), name);
}

void __cudaRegisterVar(void** binary, char* shadow, char*, const char* name, int, size_t, int, int) {
  FatBinaries::shared().name_variable(shadow, reinterpret_cast<FatBinary*>(binary), name);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  configurations.push_back({grid, block, shared_bytes, static_cast<cudaStream_t>(stream)});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (configurations.empty()) return ended(cudaErrorMissingConfiguration);
  const Configuration& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                               cudaStream_t stream) {
  return launch_kernel(kernel, grid, block, arguments, shared_bytes, stream);
}

// ---- errors

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorMisalignedAddress:
      return "misaligned address";
    case cudaErrorIllegalInstruction:
      return "an illegal instruction was encountered";
    case cudaErrorLaunchTimeout:
      return "the launch timed out and was terminated";
    default:
      thread_local std::string text;
      text = "error " + std::to_string(static_cast<int>(error));
      return text.c_str();
  }
}

// ---- the GPU

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return ended(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return ended(cudaErrorInvalidDevice);
  *value = attribute_of(attribute);
  if (*value >= 0) return cudaSuccess;
  report("expected an attribute of cudart.cpp, got number " + std::to_string(attribute) + ". Add it there.");
  return ended(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceSynchronize() {
  ++torchrec_dyn_host_waits;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++torchrec_dyn_host_waits;
  return ended(stream == nullptr ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

// No stream is captured.
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return ended(stream == nullptr ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

// ---- kernels

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  const Kernel* kernel = FatBinaries::shared().kernel(stub);
  if (kernel == nullptr) return ended(cudaErrorInvalidDeviceFunction);
  const KernelFacts told = facts(*kernel);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->ptxVersion = attributes->binaryVersion = FatBinaries::shared().compute_capability();
  attributes->maxThreadsPerBlock = told.max_threads > 0 ? told.max_threads : 1024;
  attributes->sharedSizeBytes = told.shared_bytes;
  attributes->localSizeBytes = told.local_bytes;
  attributes->numRegs = 32;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* stub, int threads, size_t,
                                                                   unsigned) {
  if (FatBinaries::shared().kernel(stub) == nullptr) return ended(cudaErrorInvalidDeviceFunction);
  if (threads <= 0 || threads > attribute_of(cudaDevAttrMaxThreadsPerBlock)) return ended(cudaErrorInvalidValue);
  *blocks = std::min(attribute_of(cudaDevAttrMaxThreadsPerMultiProcessor) / threads,
                     attribute_of(cudaDevAttrMaxBlocksPerMultiprocessor));
  return cudaSuccess;
}

// ---- memory

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{64} << 30;
  return ended(torchrec_dyn_lost_device == 0 ? cudaSuccess : cudaErrorIllegalAddress);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (stream != nullptr) return ended(cudaErrorInvalidResourceHandle);
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return *memory == nullptr ? ended(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

// All work has ended when it is queued.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  ++torchrec_dyn_host_waits;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int byte, size_t bytes, cudaStream_t stream) {
  if (stream != nullptr) return ended(cudaErrorInvalidResourceHandle);
  if (bytes > 0) std::memset(memory, byte, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void* shadow) {
  *address = part_of_variable(shadow, 0, 0);
  return ended(*address != nullptr ? cudaSuccess : cudaErrorInvalidSymbol);
}

cudaError_t cudaMemcpyFromSymbol(void* to, const void* shadow, size_t bytes, size_t offset, cudaMemcpyKind) {
  const char* from = part_of_variable(shadow, bytes, offset);
  if (from == nullptr) return ended(cudaErrorInvalidSymbol);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void* shadow, const void* from, size_t bytes, size_t offset, cudaMemcpyKind) {
  char* to = part_of_variable(shadow, bytes, offset);
  if (to == nullptr) return ended(cudaErrorInvalidSymbol);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

// ---- the driver

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = driver_function(name);
  *found = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
