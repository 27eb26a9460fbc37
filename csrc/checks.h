// Checks of the arguments of ops. Messages have one form:
// `<op>: expected <rule>, got <value>. <what to do>.`
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace torchrec_dyn {

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// As STD_TORCH_CHECK, but the message is the text alone: a function and a file of ours say nothing to the user of an
// op.
#define TORCHREC_DYN_CHECK(condition, ...) \
  if (!(condition)) [[unlikely]]           \
  throw std::runtime_error(torchrec_dyn::text_of(__VA_ARGS__))

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Device;
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

// Checks that a tensor's storage holds all its elements (it can be resized below a tensor), and that no element begins
// inside another element's bytes.
inline void check_memory(const char* op, const char* name, const Tensor& tensor) {
  const int64_t elements = tensor.numel();
  if (elements == 0) return;
  const auto size = static_cast<int64_t>(tensor.element_size());
  int64_t bytes = 0;
  TORCHREC_DYN_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes) == AOTI_TORCH_SUCCESS, op, ": expected ", name,
                     " with a storage, got none. Pass a dense tensor.");
  TORCHREC_DYN_CHECK(bytes / size - tensor.storage_offset() >= elements, op, ": expected ", name,
                     " in a storage that holds its ", elements, " elements, got a storage of ", bytes,
                     " bytes. Do not resize the storage of a tensor.");
  const auto past =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % static_cast<size_t>(size));
  TORCHREC_DYN_CHECK(past == 0, op, ": expected ", name, " at a multiple of ", size, " bytes, got an address ", past,
                     " bytes past it. Call .clone() first.");
}

// `device`: the CPU, any GPU, or the GPU with this index: kernels cannot read the memory of another one. Descriptions
// of a call (layout, table_offsets, ...) are on the CPU for every kernel.
inline void check_tensor(const char* op, const char* name, const Tensor& tensor, ScalarType type,
                         const Device& device = DeviceType::CPU) {
  TORCHREC_DYN_CHECK(tensor.scalar_type() == type, op, ": expected ", name, " of dtype ", dtype_name(type), ", got ",
                     dtype_name(tensor.scalar_type()), ". Convert it first.");
  const bool wants_cpu = device.is_cpu();
  TORCHREC_DYN_CHECK(wants_cpu ? tensor.is_cpu() : tensor.is_cuda(), op, ": expected ", name, " on ",
                     wants_cpu ? "the CPU" : "the GPU", ", got another device. Move it with ",
                     wants_cpu ? ".cpu()." : ".cuda().");
  TORCHREC_DYN_CHECK(device.index() == -1 || tensor.get_device_index() == device.index(), op, ": expected ", name,
                     " on GPU ", device.index(), ", as the first tensor, got GPU ", tensor.get_device_index(),
                     ". Move it with .cuda(", device.index(), ").");
  TORCHREC_DYN_CHECK(tensor.is_contiguous(), op, ": expected ", name,
                     " to be contiguous, got strides. Call .contiguous() first.");
  check_memory(op, name, tensor);
}

// Checks that the tensors that an op writes share no memory with each other or with a tensor that it reads: what it has
// checked stays true while it writes. Tables that name the same tensors in their layout are not found.
class SeparateMemory {
 public:
  SeparateMemory& writes(const Tensor& tensor) { return add(written_, tensor); }
  SeparateMemory& writes(const std::vector<Tensor>& tensors) {
    written_.reserve(written_.size() + tensors.size());
    for (const Tensor& tensor : tensors) add(written_, tensor);
    return *this;
  }
  // Tensors, or optional ones.
  template <typename... Tensors>
  SeparateMemory& reads(const Tensors&... tensors) {
    (read(tensors), ...);
    return *this;
  }

  // `others`: more memory that the op writes, whose ranges were checked before.
  void check(const char* op, const SeparateMemory* others = nullptr) {
    std::sort(written_.begin(), written_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    bool shared = false;
    for (size_t i = 1; i < written_.size(); ++i) shared |= written_[i - 1].end > written_[i].begin;
    for (const Range& read : read_) shared |= overlaps(written_, read) || (others && overlaps(others->written_, read));
    if (others != nullptr)
      for (const Range& written : written_) shared |= overlaps(others->written_, written);
    TORCHREC_DYN_CHECK(!shared, op,
                       ": expected tensors that share no memory with a tensor that the op writes, got two ",
                       "that do. Call .clone() first.");
  }

 private:
  struct Range {
    uintptr_t begin, end;
  };

  void read(const Tensor& tensor) { add(read_, tensor); }
  void read(const std::optional<Tensor>& tensor) {
    if (tensor) add(read_, *tensor);
  }

  // `sorted`: ranges that do not overlap.
  static bool overlaps(const std::vector<Range>& sorted, const Range& range) {
    const auto after = std::partition_point(sorted.begin(), sorted.end(),
                                            [&](const Range& other) { return other.end <= range.begin; });
    return after != sorted.end() && after->begin < range.end;
  }

  SeparateMemory& add(std::vector<Range>& ranges, const Tensor& tensor) {
    const auto bytes = static_cast<uintptr_t>(tensor.numel()) * tensor.element_size();
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    if (bytes > 0) ranges.push_back({begin, begin + bytes});
    return *this;
  }

  std::vector<Range> written_;
  std::vector<Range> read_;
};

inline void check_size(const char* op, const char* what, int64_t expected, int64_t got) {
  TORCHREC_DYN_CHECK(expected == got, op, ": expected ", what, " = ", expected, ", got ", got, ".");
}

// Checks a tensor with one number for each of `count` things.
inline void check_numbers(const char* op, const char* name, const Tensor& numbers, ScalarType type, int64_t count,
                          const Device& device = DeviceType::CPU) {
  check_tensor(op, name, numbers, type, device);
  TORCHREC_DYN_CHECK(numbers.numel() == count, op, ": expected the number of ", name, " = ", count, ", got ",
                     numbers.numel(), ".");
}
inline void check_numbers(const char* op, const char* name, const std::optional<Tensor>& numbers, ScalarType type,
                          int64_t count, const Device& device = DeviceType::CPU) {
  if (numbers) check_numbers(op, name, *numbers, type, count, device);
}

template <typename T>
const T* const_data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
// Null if there is no tensor.
template <typename T>
const T* const_data(const std::optional<Tensor>& tensor) {
  return tensor ? const_data<T>(*tensor) : nullptr;
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// A function that raises the error of a device on which nothing succeeds any more: simt::raise_lost_device.
using RaiseLost = void (*)();

// Returns a tensor whose memory is not initialised. The shape and the type are valid, so only memory can be missing,
// unless the device is lost: torch's own error says no more than that a call failed.
inline Tensor new_tensor(torch::headeronly::IntHeaderOnlyArrayRef shape, ScalarType type,
                         const Device& device = DeviceType::CPU, RaiseLost raise_lost = nullptr) {
  // Not by torch::stable::empty, which finds its op by name: it takes three times as long.
  constexpr size_t kMostDimensions = 2;
  int64_t strides[kMostDimensions] = {1, 1};
  if (shape.size() == kMostDimensions) strides[0] = std::max<int64_t>(shape[1], 1);
  AtenTensorHandle tensor = nullptr;
  const auto index = device.is_cpu() ? 0 : device.index();
  if (aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides, static_cast<int32_t>(type),
                               static_cast<int32_t>(device.type()), index, &tensor) == AOTI_TORCH_SUCCESS)
    return Tensor(tensor);
  if (raise_lost != nullptr) raise_lost();
  throw std::bad_alloc();
}

// Returns a tensor over memory of ours, which free() releases when the tensor is dropped, or now if there is no memory
// for the tensor.
template <typename Free>
Tensor tensor_of(void* memory, torch::headeronly::IntHeaderOnlyArrayRef shape,
                 torch::headeronly::IntHeaderOnlyArrayRef strides, ScalarType type, const Free& free,
                 const Device& device = DeviceType::CPU, RaiseLost raise_lost = nullptr) {
  std::shared_ptr<bool> is_freed;
  try {
    is_freed = std::make_shared<bool>(false);
    return torch::stable::from_blob(memory, shape, strides, device, type, [free, is_freed](void*) {
      *is_freed = true;
      free();
    });
  } catch (const std::exception&) {  // torch has called the deleter by now, or never will
    if (!is_freed || !*is_freed) free();
    if (raise_lost != nullptr) raise_lost();
    throw std::bad_alloc();
  }
}

inline Tensor new_int64(int64_t size) { return new_tensor({size}, ScalarType::Long); }

// table_offsets [T + 1]: the ids of table t are [table_offsets[t], table_offsets[t + 1]).
inline void check_table_offsets(const char* op, const int64_t* offset, int64_t count, int64_t tables, int64_t ids) {
  check_size(op, "the number of table_offsets", tables + 1, count);
  TORCHREC_DYN_CHECK(offset[0] == 0, op, ": expected table_offsets to start at 0, got ", offset[0], ".");
  for (int64_t t = 0; t < tables; ++t)
    TORCHREC_DYN_CHECK(offset[t] <= offset[t + 1], op, ": expected ascending table_offsets, got ", offset[t],
                       " before ", offset[t + 1], ".");
  check_size(op, "the last of table_offsets", ids, offset[tables]);
}

inline void check_table_offsets(const char* op, const Tensor& offsets, int64_t tables, int64_t ids) {
  check_tensor(op, "table_offsets", offsets, ScalarType::Long);
  check_table_offsets(op, const_data<int64_t>(offsets), offsets.numel(), tables, ids);
}

inline void check_table_offsets(const char* op, const std::vector<int64_t>& offsets, int64_t tables, int64_t ids) {
  check_table_offsets(op, offsets.data(), static_cast<int64_t>(offsets.size()), tables, ids);
}

}  // namespace torchrec_dyn
