// The admission of new ids on a device: admission_cpu.cpp for CUDA.
#include <algorithm>
#include <vector>

#include "device_call.h"
#include "lookup/admission_arguments.h"
#include "lookup/admission_kernels.h"
#include "lookup/sent_scores_arguments.h"
#include "storage/id_map_changes_arguments.h"

namespace torchrec_dyn {
namespace {

void raise_counter_error(const int64_t* words) {
  TORCHREC_DYN_CHECK(false, AdmitCall::kOp, ": expected counters in rows below ", words[1], ", got one in row ",
                     words[0], ".");
}

AdmitResult admit(const AdmitCall& given) {
  const Handles::Shared waiting = given.read_counters();
  given.check(waiting.get(), waiting ? waiting->device : Device(kDevice));
  const int64_t n = given.ids(), tables = given.tables();
  Tensor numbers = new_int64(tables * kAdmissionNumbers);
  auto* const number = mutable_data<int64_t>(numbers);
  std::fill(number, number + numbers.numel(), int64_t{0});
  DeviceCall call(given.new_ids);
  if (n == 0) return {new_device_tensor({0}), new_device_tensor({0}), new_device_tensor({0}), numbers};
  const std::vector<int64_t> offsets(given.offsets(), given.offsets() + tables + 1);
  const double* const squares = const_data<double>(given.squares);
  AdmittedBatch batch{
      given.new_ids_to_admit(call.copy_of(given.read_rules()),
                             call.copy_of(std::vector<double>(squares, squares + given.squares.numel()))),
      {nullptr, 0},
      {nullptr, 0},
      call.copy_of(offsets),
      tables,
      n,
      call.allocate_for<int64_t>(n),
      call.allocate_for<int64_t>(n),
      call.allocate_for<int64_t>(n),
      call.allocate_for<int64_t>(kAdmittedLists * n + 1)};
  if (waiting) {
    batch.maps = send_maps(call, waiting->maps, offsets.data());
    batch.scores = send_scores(call, *waiting, offsets.data(), nullptr);
  }
  const int64_t begins = kAdmittedLists * (tables + 1);
  auto* const words = call.zeros<int64_t>(begins + 2 * tables);
  simt::launch(call.stream(), n, DecideAdmission{batch, words + begins, call.errors(raise_counter_error)});
  simt::exclusive_sum(call.stream(), batch.places, kAdmittedLists * n + 1);
  simt::launch(call.stream(), begins, ReadAdmittedOffsets{batch, words});
  std::vector<int64_t> read(static_cast<size_t>(begins + 2 * tables));
  if (given.sums || !given.admits_all()) {
    simt::copy_to_host(call.stream(), read.data(), words, static_cast<int64_t>(read.size() * sizeof(int64_t)));
  } else {  // known without a wait
    std::copy(offsets.begin(), offsets.end(), read.begin());
    std::fill(read.begin() + tables + 1, read.begin() + begins, n);
  }
  for (int64_t t = 0; t < tables; ++t) {
    for (int64_t list = 0; list < kAdmittedLists; ++list) {
      const int64_t* const begin = read.data() + list * (tables + 1) + t;
      number[t * kAdmissionNumbers + list] = begin[1] - begin[0];
    }
    const int64_t* const occurred = read.data() + begins + 2 * t;
    number[t * kAdmissionNumbers + kAdmittedLists] = given.sums ? occurred[0] : 0;
    number[t * kAdmissionNumbers + kAdmittedLists + 1] = occurred[1];
  }
  const int64_t admitted = read[static_cast<size_t>(tables)], listed = read[static_cast<size_t>(begins - 1)];
  Tensor places = new_device_tensor({admitted}), first = new_device_tensor({listed});
  Tensor second = new_device_tensor({listed});
  simt::launch(
      call.stream(), n,
      ListAdmitted{batch, mutable_data<int64_t>(places), mutable_data<int64_t>(first), mutable_data<int64_t>(second)});
  call.finish();
  return {places, first, second, numbers};
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_STRUCT_KERNEL("admit", &admit)); }

}  // namespace torchrec_dyn
