// TORCHREC_DYN_STRUCT_KERNEL("op", &function): as TORCHREC_DYN_KERNEL (kernel.h), for a function of one struct, which
// reads the arguments of the op itself. The struct is what the kernels of all devices share: their arguments are
// spelled twice, in the schema and in the struct.
#pragma once

#include <cstdint>
#include <tuple>

#include "checks.h"
#include "kernel.h"

namespace torchrec_dyn {

// Reads the arguments of a call one after the other. The first member of the struct; its other members are initialised
// by read<T>() in the order of the schema, which is that of their declaration.
class ArgumentReader {
 public:
  ArgumentReader(const StableIValue* arguments, uint64_t count) : next_(arguments), left_(count) {}

  template <typename T>
  T read() {
    TORCHREC_DYN_CHECK(left_ > 0, "expected a schema of more arguments.");
    --left_;
    return torch::stable::detail::to<T>(*next_++);
  }

  uint64_t left() const { return left_; }

 private:
  const StableIValue* next_;
  uint64_t left_;
};

// What a kernel returns: a tensor, a tuple of tensors, or nothing.
template <typename Result>
constexpr uint64_t kResultCount = 1;
template <>
inline constexpr uint64_t kResultCount<void> = 0;
template <typename... Tensors>
constexpr uint64_t kResultCount<std::tuple<Tensors...>> = sizeof...(Tensors);

inline void write_results(StableIValue* stack, const Tensor& result) { *stack = torch::stable::detail::from(result); }
template <typename... Tensors>
void write_results(StableIValue* stack, const std::tuple<Tensors...>& results) {
  std::apply([stack](const auto&... result) mutable { (write_results(stack++, result), ...); }, results);
}

template <auto kFunction>
struct StructKernel;

template <typename Result, typename Call, Result (*kFunction)(const Call&)>
struct StructKernel<kFunction> {
  static void call(StableIValue* stack, uint64_t arguments, uint64_t results) {
    const Call call{ArgumentReader(stack, arguments)};
    TORCHREC_DYN_CHECK(call.arguments.left() == 0 && results == kResultCount<Result>, "expected a schema of ",
                       arguments - call.arguments.left(), " arguments and ", kResultCount<Result>, " results.");
    if constexpr (kResultCount<Result> == 0)
      kFunction(call);
    else
      write_results(stack, kFunction(call));
  }
};

#define TORCHREC_DYN_STRUCT_KERNEL(op, function) \
  op, (torchrec_dyn::with_memory_error<op, torchrec_dyn::StructKernel<function>::call>)

}  // namespace torchrec_dyn
