// Checks of the arguments of ops. Messages have one form:
// `<op>: expected <rule>, got <value>. <what to do>.`
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <vector>

namespace torchrec_dyn {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    default:
      return "another dtype";
  }
}

// `device`: CPU or CUDA. Descriptions of a call (layout, table_offsets, ...) are on the CPU for every kernel.
inline void check_tensor(const char* op, const char* name, const Tensor& tensor, ScalarType type,
                         DeviceType device = DeviceType::CPU) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, op, ": expected ", name, " of dtype ", dtype_name(type), ", got ",
                  dtype_name(tensor.scalar_type()), ". Convert it first.");
  const bool wants_cpu = device == DeviceType::CPU;
  STD_TORCH_CHECK(wants_cpu ? tensor.is_cpu() : tensor.is_cuda(), op, ": expected ", name, " on ",
                  wants_cpu ? "the CPU" : "the GPU", ", got another device. Move it with ",
                  wants_cpu ? ".cpu()." : ".cuda().");
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": expected ", name,
                  " to be contiguous, got strides. Call .contiguous() first.");
}

inline void check_size(const char* op, const char* what, int64_t expected, int64_t got) {
  STD_TORCH_CHECK(expected == got, op, ": expected ", what, " = ", expected, ", got ", got, ".");
}

template <typename T>
const T* const_data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Returns a tensor whose memory is not initialised.
inline Tensor new_tensor(torch::headeronly::IntHeaderOnlyArrayRef shape, ScalarType type,
                         DeviceType device = DeviceType::CPU) {
  return torch::stable::empty(shape, type, std::nullopt, torch::stable::Device(device));
}

inline Tensor new_int64(int64_t size) { return new_tensor({size}, ScalarType::Long); }

// table_offsets [T + 1]: the ids of table t are [table_offsets[t], table_offsets[t + 1]).
inline void check_table_offsets(const char* op, const Tensor& offsets, int64_t tables, int64_t ids) {
  check_tensor(op, "table_offsets", offsets, ScalarType::Long);
  check_size(op, "the number of table_offsets", tables + 1, offsets.numel());
  const int64_t* offset = const_data<int64_t>(offsets);
  STD_TORCH_CHECK(offset[0] == 0, op, ": expected table_offsets to start at 0, got ", offset[0], ".");
  for (int64_t t = 0; t < tables; ++t)
    STD_TORCH_CHECK(offset[t] <= offset[t + 1], op, ": expected ascending table_offsets, got ", offset[t], " before ",
                    offset[t + 1], ".");
  check_size(op, "the last of table_offsets", ids, offset[tables]);
}

}  // namespace torchrec_dyn
