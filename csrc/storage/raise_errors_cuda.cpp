// The errors that kernels have reported (device_errors.h).
#include <stdexcept>
#include <string>

#include "device_call.h"
#include "kernel.h"

namespace torchrec_dyn {
namespace {

void raise_errors(const Tensor& like) {
  const ChosenDevice chosen(like);
  int64_t record[kErrorWords];
  simt::take_error(record);  // not in the block below: its own errors are CUDA's, which no call of ours has found
  try {
    raise_device_error(record);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) +
                             " An earlier call on this GPU has found this: it has changed no table, later calls have "
                             "run. Set TORCHREC_DYN_SYNC_ERRORS=1 to get the error in the call itself.");
  }
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("raise_errors", &raise_errors)); }

}  // namespace torchrec_dyn
