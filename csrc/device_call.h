// One call of an op on a device: the device and stream that torch has chosen, and memory for the call. For files
// *_cuda.cpp, which are compiled for CUDA and, with TORCHREC_DYN_SIMT, for the tests without a GPU (simt.h).
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#if !defined(TORCHREC_DYN_SIMT)
#include <dlfcn.h>
#endif

#include "checks.h"
#include "device_errors.h"
#include "simt.h"
#if defined(TORCHREC_DYN_SIMT) && !defined(TORCHREC_DYN_PTX)
#include "simt_cpu.h"
#endif

// As STABLE_TORCH_LIBRARY_IMPL, for the kernels of a device. The simt build has a second library of ops, whose tensors
// are on the CPU (tests/support/device_ops.py).
#if defined(TORCHREC_DYN_SIMT)
#define TORCHREC_DYN_DEVICE_KERNELS(m) STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn_simt, CPU, m)
#else
#define TORCHREC_DYN_DEVICE_KERNELS(m) STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CUDA, m)
#endif

namespace torchrec_dyn {

#if defined(TORCHREC_DYN_SIMT)
constexpr DeviceType kDevice = DeviceType::CPU;

inline bool find_current_stream(int32_t, void** stream) {
  *stream = nullptr;
  return true;
}

// Tensors do not show their GPU here, so that memory of a GPU is taken inside of a call on it is checked by counting.
class ChosenDevice {
 public:
  explicit ChosenDevice(const Tensor&) { ++count(); }
  ChosenDevice(const ChosenDevice&) = delete;
  ChosenDevice& operator=(const ChosenDevice&) = delete;
  ~ChosenDevice() { --count(); }
  void* stream() const { return nullptr; }

  static int& count() {  // of this thread
    static thread_local int count = 0;
    return count;
  }
};
#else
constexpr DeviceType kDevice = DeviceType::CUDA;

// Finds torch's current stream of a GPU; false if there is none. libtorch_cuda is not linked, so that the extension
// loads beside a torch without CUDA; a tensor on a GPU shows that torch has loaded it.
inline bool find_current_stream(int32_t device, void** stream) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const auto current = []() -> Function {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  return current != nullptr && current(device, stream) == AOTI_TORCH_SUCCESS;
}

// Makes the tensor's device the current one, as long as this object lives.
class ChosenDevice {
 public:
  explicit ChosenDevice(const Tensor& tensor) : index_(tensor.get_device_index()), guard_(index_) {}

  // torch's current stream.
  void* stream() const {
    void* stream = nullptr;
    TORCHREC_DYN_CHECK(find_current_stream(index_, &stream),
                       "torchrec_dyn: expected a torch with CUDA, got one without a current stream.");
    return stream;
  }

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
};
#endif

// Raises the error of a record that simt::take_error has copied; does nothing if there is none.
inline void raise_device_error(const int64_t (&record)[kErrorWords]) {
  if (record[0] != 0) reinterpret_cast<RaiseError>(record[0])(record + 1);
}

// True if TORCHREC_DYN_SYNC_ERRORS=1. It is read at each call: a user may set it in a running program.
inline bool raises_errors_at_once() {
  const char* value = std::getenv("TORCHREC_DYN_SYNC_ERRORS");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

// Makes the device of a tensor current and gives kernels their stream. torch's allocator keeps the memory of a call for
// this stream, so it may be released before the kernels have run.
class DeviceCall final : public simt::Workspace {
 public:
  explicit DeviceCall(const Tensor& tensor)
      : device_(tensor.device()), chosen_(tensor), stream_{chosen_.stream(), this} {}
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  const Device& device() const { return device_; }
  const simt::Stream& stream() const { return stream_; }

  void* allocate(int64_t bytes) override {
    allocated_.push_back(new_tensor({bytes}, ScalarType::Byte, kDevice, &simt::raise_lost_device));
    return allocated_.back().mutable_data_ptr();
  }

  // Memory for `count` objects, not initialised.
  template <typename T>
  T* allocate_for(int64_t count) {
    return static_cast<T*>(allocate(count * static_cast<int64_t>(sizeof(T))));
  }

  // Memory for `count` objects, all bytes 0.
  template <typename T>
  T* zeros(int64_t count) {
    T* objects = allocate_for<T>(count);
    simt::fill_zero(stream_, objects, count * static_cast<int64_t>(sizeof(T)));
    return objects;
  }

  // A copy of objects of the host.
  template <typename T>
  const T* copy_of(const std::vector<T>& objects) {
    static_assert(sizeof(T) % sizeof(int64_t) == 0);
    const auto count = static_cast<int64_t>(objects.size());
    T* copy = allocate_for<T>(count);
    simt::copy_to_device(stream_, copy, objects.data(), count * static_cast<int64_t>(sizeof(T)));
    return copy;
  }

  // Where kernels of this call report errors, which `raise` raises later on the host.
  ErrorReport errors(RaiseError raise) const { return {simt::error_record(), reinterpret_cast<int64_t>(raise)}; }

  // The last line of a call whose kernels report errors.
  void finish() const {
    if (!raises_errors_at_once()) return;
    int64_t record[kErrorWords];
    simt::take_error(record);
    raise_device_error(record);
  }

  // A word of the device, read by the host: waits for all kernels before it.
  int64_t read(const int64_t* word) const {
    int64_t value = 0;
    simt::copy_to_host(stream_, &value, word, sizeof value);
    return value;
  }

 private:
  Device device_;
  ChosenDevice chosen_;
  simt::Stream stream_;
  std::vector<Tensor> allocated_;
};

// Inside of a DeviceCall: torch takes the memory on its current GPU.
inline Tensor new_device_tensor(torch::headeronly::IntHeaderOnlyArrayRef shape, ScalarType type = ScalarType::Long) {
#if defined(TORCHREC_DYN_SIMT)
  TORCHREC_DYN_CHECK(ChosenDevice::count() > 0,
                     "torchrec_dyn: expected the GPU to be chosen before memory is taken, got the one of the caller.");
#endif
  return new_tensor(shape, type, kDevice, &simt::raise_lost_device);
}

}  // namespace torchrec_dyn
