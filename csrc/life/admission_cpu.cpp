// Admission by chance on the CPU.
#include "kernel.h"
#include "life/admission_arguments.h"
#include "parallel.h"

namespace torchrec_dyn {
namespace {

Tensor admit_by_chance(const Tensor& ids, const Tensor& counts, int64_t key, int64_t step, double probability) {
  check_admission(ids, counts, probability, DeviceType::CPU);
  const int64_t* id = const_data<int64_t>(ids);
  const int64_t* count = const_data<int64_t>(counts);
  for (int64_t i = 0; i < counts.numel(); ++i) check_occurrences(count[i]);
  Tensor admitted = new_tensor({ids.numel()}, ScalarType::Bool);
  bool* is_in = mutable_data<bool>(admitted);
  for_each_range(ids.numel(), 2048, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      is_in[i] =
          admits(admission_draw(static_cast<uint64_t>(key), step, id[i]), probability, static_cast<uint64_t>(count[i]));
  });
  return admitted;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("admit_by_chance", &admit_by_chance)); }

}  // namespace torchrec_dyn
