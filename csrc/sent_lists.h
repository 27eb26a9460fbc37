// Lists of the host that launches read, sent to the device together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "device_call.h"
#include "simt.h"

namespace torchrec_dyn {

// The bytes of a list in SentLists: kernels read some of them in units of 16 bytes.
template <typename T>
size_t bytes_of(const std::vector<T>& list) {
  return (list.size() * sizeof(T) + 15) / 16 * 16;
}

// Lists of the host in one piece of memory of the device: one send, that does not wait. Requires elements of whole
// words.
class SentLists {
 public:
  // `bytes`: of all lists together.
  SentLists(DeviceCall& call, size_t bytes)
      : call_(call), host_(bytes), memory_(static_cast<std::byte*>(call.allocate(static_cast<int64_t>(bytes)))) {}

  // Returns the place of the list in the memory of the device.
  template <typename T>
  T* add(const std::vector<T>& list) {
    static_assert(sizeof(T) % sizeof(int64_t) == 0);
    if (!list.empty()) std::memcpy(host_.data() + used_, list.data(), list.size() * sizeof(T));
    return reinterpret_cast<T*>(memory_ + std::exchange(used_, used_ + bytes_of(list)));
  }

  void send() { simt::copy_to_device(call_.stream(), memory_, host_.data(), static_cast<int64_t>(used_)); }

 private:
  DeviceCall& call_;
  std::vector<std::byte> host_;
  std::byte* memory_;
  size_t used_ = 0;
};

}  // namespace torchrec_dyn
