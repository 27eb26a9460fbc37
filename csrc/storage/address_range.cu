// Address ranges of a GPU, by the virtual memory functions of CUDA's driver, and memory of the host for a GPU. The
// driver's library is not linked, so that the extension loads on machines without a driver: the functions are looked up
// when the first range is made. And the error of a GPU that gives no memory since it is lost.
#include "storage/address_range.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_errors.h"
#include "device_errors.h"

namespace torchrec_dyn {
namespace {

template <typename Function>
Function driver_function(const char* name) {
  constexpr unsigned kVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  simt::check_cuda(cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string("torchrec_dyn: expected a CUDA driver with ") + name +
                             ", got an older one. Install a newer driver.");
  return reinterpret_cast<Function>(function);
}

// nvcc's header renames functions of which there is a second version: the names below are those of the first, as the
// look-up wants them, and its result is the version of kVersion.
struct Driver {
#define TORCHREC_DYN_DRIVER_FUNCTION(name) decltype(&::name) name = driver_function<decltype(&::name)>(#name)
  TORCHREC_DYN_DRIVER_FUNCTION(cuDeviceGetCount);
  TORCHREC_DYN_DRIVER_FUNCTION(cuDeviceCanAccessPeer);
  TORCHREC_DYN_DRIVER_FUNCTION(cuDevicePrimaryCtxRetain);
  TORCHREC_DYN_DRIVER_FUNCTION(cuDevicePrimaryCtxRelease);
  TORCHREC_DYN_DRIVER_FUNCTION(cuCtxPushCurrent);
  TORCHREC_DYN_DRIVER_FUNCTION(cuCtxPopCurrent);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemGetAllocationGranularity);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemAddressReserve);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemAddressFree);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemCreate);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemRelease);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemMap);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemUnmap);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemSetAccess);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemHostAlloc);
  TORCHREC_DYN_DRIVER_FUNCTION(cuMemFreeHost);
#undef TORCHREC_DYN_DRIVER_FUNCTION
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

void check_driver(CUresult error, const char* where) {
  if (error == CUDA_SUCCESS) return;
  if (error == CUDA_ERROR_OUT_OF_MEMORY) throw std::bad_alloc();
  throw std::runtime_error(std::string("torchrec_dyn: expected ") + where + " to succeed on the GPU, got CUDA error " +
                           std::to_string(static_cast<int>(error)) + ". An earlier kernel may be the cause; " +
                           "CUDA_LAUNCH_BLOCKING=1 shows it.");
}

// The context that a device has for all libraries of the process.
class PrimaryContext {
 public:
  explicit PrimaryContext(int32_t device) : device_(device) {
    check_driver(driver().cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  }
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  ~PrimaryContext() { driver().cuDevicePrimaryCtxRelease(device_); }
  CUcontext context() const { return context_; }

 private:
  int32_t device_;
  CUcontext context_{};
};

// Makes the context of a device the current one, as long as this object lives. With cudaSetDevice a thread that never
// chose a device, such as one that collects garbage, would go back to GPU 0, and make a context there: hundreds of MB.
class CurrentContext {
 public:
  explicit CurrentContext(const PrimaryContext& context) : error_(driver().cuCtxPushCurrent(context.context())) {}
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext() {
    CUcontext context{};
    if (is_set()) driver().cuCtxPopCurrent(&context);
  }
  bool is_set() const { return error_ == CUDA_SUCCESS; }
  void check() const { check_driver(error_, "cuCtxPushCurrent"); }

 private:
  CUresult error_;
};

constexpr bool is_of_a_capture(cudaError_t error) {
  return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}

// Memory that kernels of a GPU use.
class GpuRange : public AddressRange {
 public:
  // Kernels of any stream may still use the rows, and what frees memory does not wait for them. To wait for a GPU while
  // one of its streams is captured is an error, which ends the capture. Other errors are those of a process that ends,
  // or of a fork, where the driver gives back the memory itself, or of a kernel: then the memory is lost until the
  // process ends.
  bool is_idle() final {
    const CurrentContext current(context_);
    is_lost_ = !current.is_set();
    if (is_lost_) return true;
    if (is_captured()) return false;
    const cudaError_t error = cudaDeviceSynchronize();
    cudaGetLastError();
    if (is_of_a_capture(error)) return false;  // of a stream that is not this thread's
    is_lost_ = error != cudaSuccess;
    return true;
  }

 protected:
  GpuRange(int32_t device, FindStream find_stream) : device_(device), context_(device), find_stream_(find_stream) {
    check_driver(driver().cuDeviceGetCount(&devices_), "cuDeviceGetCount");
  }

  // Calls free() with the context of the GPU, unless its memory is lost.
  template <typename Free>
  void free_by(const Free& free) const {
    const CurrentContext current(context_);
    if (!is_lost_ && current.is_set()) free();
  }

  int32_t device_;
  PrimaryContext context_;
  int devices_ = 0;

 private:
  // True if a stream of this thread is captured, or still the one that was when this was asked first.
  bool is_captured() {
    if (captured_ != nullptr && captures(captured_)) return true;
    captured_ = nullptr;
    for (int32_t device = 0; device < devices_; ++device) {
      void* stream = nullptr;
      if (!find_stream_(device, &stream) || stream == nullptr || !captures(stream)) continue;
      captured_ = stream;
      return true;
    }
    return false;
  }

  static bool captures(void* stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
    cudaGetLastError();
    return error == cudaSuccess && status != cudaStreamCaptureStatusNone;
  }

  FindStream find_stream_;
  void* captured_ = nullptr;  // a stream
  bool is_lost_ = false;
};

class CudaAddressRange final : public GpuRange {
 public:
  CudaAddressRange(int64_t bytes, int32_t device, FindStream find_stream) : GpuRange(device, find_stream) {
    const CurrentContext current(context_);
    current.check();
    find_peers();
    size_t page = 0;
    const CUmemAllocationProp kind = memory_kind();
    check_driver(driver().cuMemGetAllocationGranularity(&page, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                 "cuMemGetAllocationGranularity");
    page_ = static_cast<int64_t>(page);
    bytes_ = whole_pages(bytes, page_);
    check_driver(driver().cuMemAddressReserve(&address_, static_cast<size_t>(bytes_), 0, 0, 0), "cuMemAddressReserve");
    begin_ = reinterpret_cast<void*>(address_);
  }

  ~CudaAddressRange() override {
    free_by([this] {
      int64_t begin = 0;
      for (const int64_t end : ends_) {
        driver().cuMemUnmap(address_ + static_cast<CUdeviceptr>(begin), static_cast<size_t>(end - begin));
        begin = end;
      }
      driver().cuMemAddressFree(address_, static_cast<size_t>(bytes_));
    });
  }

 protected:
  // One piece of memory a call, whatever its size: growth in large steps makes few pieces.
  int64_t commit_from(int64_t committed, int64_t bytes) override {
    const CurrentContext current(context_);
    current.check();
    const int64_t end = whole_pages(bytes, page_);
    const auto size = static_cast<size_t>(end - committed);
    const CUdeviceptr begin = address_ + static_cast<CUdeviceptr>(committed);
    ends_.reserve(ends_.size() + 1);  // so that nothing fails after the piece has its address
    const CUmemAllocationProp kind = memory_kind();
    CUmemGenericAllocationHandle piece{};
    check_driver(driver().cuMemCreate(&piece, size, &kind, 0), "cuMemCreate");
    const CUresult mapped = driver().cuMemMap(begin, size, 0, piece, 0);
    driver().cuMemRelease(piece);  // the mapping keeps the memory, until it is unmapped
    check_driver(mapped, "cuMemMap");
    const CUresult opened = driver().cuMemSetAccess(begin, size, access_.data(), access_.size());
    if (opened != CUDA_SUCCESS) driver().cuMemUnmap(begin, size);
    check_driver(opened, "cuMemSetAccess");
    ends_.push_back(end);
    return end;
  }

 private:
  CUmemAllocationProp memory_kind() const {
    CUmemAllocationProp kind{};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind.location.id = device_;
    return kind;
  }

  // A copy between two GPUs is a kernel of either, or of the driver: it faults on memory that its GPU has no access to.
  void find_peers() {
    CUmemAccessDesc access{memory_kind().location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    access_.push_back(access);
    for (int32_t peer = 0; peer < devices_; ++peer) {
      if (peer == device_) continue;
      int can = 0;
      check_driver(driver().cuDeviceCanAccessPeer(&can, peer, device_), "cuDeviceCanAccessPeer");
      access.location.id = peer;
      if (can != 0) access_.push_back(access);
    }
  }

  std::vector<CUmemAccessDesc> access_;  // of this GPU, and of the others that can reach its memory
  int64_t page_ = 0;
  CUdeviceptr address_ = 0;
  std::vector<int64_t> ends_;  // of the pieces: each is unmapped as it was mapped
};

// All GPUs reach memory of the host that the driver has allocated, by its address in the process (CUDA driver API,
// cuMemHostAlloc: unified addressing, which every 64-bit GPU has).
class HostRange final : public GpuRange {
 public:
  HostRange(int64_t bytes, int32_t device, FindStream find_stream) : GpuRange(device, find_stream) {
    const CurrentContext current(context_);
    current.check();
    bytes_ = bytes;
    const CUresult error = driver().cuMemHostAlloc(&begin_, static_cast<size_t>(bytes), CU_MEMHOSTALLOC_PORTABLE);
    // As a driver says that the system lets no more memory be locked.
    if (error == CUDA_ERROR_OPERATING_SYSTEM) throw std::bad_alloc();
    check_driver(error, "cuMemHostAlloc");
  }
  ~HostRange() override {
    free_by([this] { driver().cuMemFreeHost(begin_); });
  }

 protected:
  int64_t commit_from(int64_t, int64_t) override { return bytes_; }
};

}  // namespace

std::unique_ptr<AddressRange> reserve_cuda_addresses(int64_t bytes, int32_t device, FindStream find_stream) {
  return std::make_unique<CudaAddressRange>(bytes, device, find_stream);
}

std::unique_ptr<AddressRange> reserve_host_memory(int64_t bytes, int32_t device, FindStream find_stream) {
  return std::make_unique<HostRange>(bytes, device, find_stream);
}

}  // namespace torchrec_dyn

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
