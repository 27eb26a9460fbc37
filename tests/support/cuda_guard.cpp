// A device guard for CUDA that does nothing, for a torch without CUDA (pretended_device.py).
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct NoDevices final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 0; }
};

}  // namespace

extern "C" void set_cuda_guard(bool set) {
  static const NoDevices guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(set ? &guard : nullptr);
}
