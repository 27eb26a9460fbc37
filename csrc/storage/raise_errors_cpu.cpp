// The errors of a device, on the CPU, whose ops raise their errors themselves.
#include "checks.h"
#include "kernel.h"

namespace torchrec_dyn {
namespace {

void raise_errors(const Tensor& like) {}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("raise_errors", &raise_errors)); }

}  // namespace torchrec_dyn
