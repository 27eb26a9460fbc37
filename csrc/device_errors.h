// Errors in the contents of arguments, as kernels find them: rows outside their table, offsets that do not ascend, ...
//
// The host does not wait for each call to know whether all was right. A GPU has one record in its memory, all zeros if
// there is no error. A kernel that finds an error writes the record, unless it holds an earlier one, and its call
// changes no table, but for an insert into a map that is too full, which fills it (callers reserve slots first). What
// such a call returns means nothing; the rows that it refuses are counted. A lookup marks its counts of absent ids,
// which the host reads anyway (FindRows), if there is an error; the host then takes the record and raises the error
// (storage/raise_errors_cuda.cpp).
// With TORCHREC_DYN_SYNC_ERRORS=1 each call waits for its kernels and raises their error (DeviceCall::finish).
#pragma once

#include <cstdint>

#include "both_devices.h"
#include "simt.h"

namespace torchrec_dyn {

constexpr int64_t kErrorWords = 8;

// A function of the host that raises the error of the words that a kernel has reported.
using RaiseError = void (*)(const int64_t* words);

// Where the kernels of a call report errors.
struct ErrorReport {
  int64_t* record;  // [kErrorWords] of the GPU: 0 or the address of a RaiseError; then its words
  int64_t raise;    // the address of a RaiseError

  // Does nothing if there is an earlier error. Of several threads that report at the same time, one does.
  template <typename... Words>
  TORCHREC_DYN_BOTH void report(Words... words) const {
    static_assert(sizeof...(words) < kErrorWords);
    if (simt::atomic_cas(record, 0, raise) != 0) return;
    int64_t* word = record;
    ((*++word = static_cast<int64_t>(words)), ...);
  }
};

// What a lookup adds to its first count of absent ids if there is an error: the count is then negative.
constexpr int64_t kErrorMark = INT64_MIN;

namespace simt {

// The record of the current GPU.
int64_t* error_record();
// Raises the error of a current GPU that runs no more kernels, after an illegal address, say; does nothing else. Asked
// when memory cannot be allocated: on such a GPU every allocation fails, whatever memory there is.
void raise_lost_device();
// Waits for all streams of the current GPU, copies its record to the host, and clears it if it holds an error.
void take_error(int64_t (&record)[kErrorWords]);

}  // namespace simt

}  // namespace torchrec_dyn
