// A device guard and hooks for CUDA that do nothing, for a torch that has no CUDA or no GPU (mock_device.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

constexpr c10::DeviceIndex GPUS = 2;
const c10::Device DEVICE(c10::DeviceType::CUDA, 0);

c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

// Each GPU has one stream, whose work is always done. Which one is current, only Python asks (mock_device.py).
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return GPUS; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Stream getStream(c10::Device device) const noexcept override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override { return stream(next.device()); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

// The autograd engine asks for an accelerator.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return GPUS; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return GPUS; }
};

// torch creates its hooks once, before this library is loaded. They have no members, nor have those of a torch with
// CUDA, so the first word, which points to the virtual functions, is all of them.
void set_hooks(bool set) {
  static_assert(sizeof(Hooks) == sizeof(void*) && sizeof(at::CUDAHooksInterface) == sizeof(void*));
  static void* const hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  static void* const of_torch = *static_cast<void**>(hooks);
  static const Hooks ours;
  std::memcpy(hooks, set ? static_cast<const void*>(&ours) : &of_torch, sizeof(void*));
}

}  // namespace

extern "C" void set_cuda_guard(bool set) {
  static const Guard guard;
  static auto& registered = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  static const auto* const of_torch = registered.load();
  set_hooks(set);
  registered.store(set ? &guard : of_torch);
}
