// Admission by chance on a device: admission_cpu.cpp for CUDA.
#include "device_call.h"
#include "kernel.h"
#include "life/admission_arguments.h"
#include "life/admission_kernels.h"

namespace torchrec_dyn {
namespace {

Tensor admit_by_chance(const Tensor& ids, const Tensor& counts, int64_t key, int64_t step, double probability) {
  check_admission(ids, counts, probability, kDevice);
  const int64_t n = ids.numel();
  DeviceCall call(ids);
  Tensor admitted = new_device_tensor({n}, ScalarType::Bool);
  if (n == 0) return admitted;
  const int64_t* count = const_data<int64_t>(counts);
  auto* first_bad = call.zeros<int64_t>(1);
  simt::launch(call.stream(), n, CheckOccurrences{count, n, first_bad});
  simt::launch(call.stream(), n,
               AdmitByChance{const_data<int64_t>(ids), count, n, static_cast<uint64_t>(key), step, probability,
                             mutable_data<bool>(admitted), first_bad, call.errors(raise_occurrences_error)});
  call.finish();
  return admitted;
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("admit_by_chance", &admit_by_chance)); }

}  // namespace torchrec_dyn
