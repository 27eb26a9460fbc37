// The emulator as C functions, for its tests (tests/support/ptx_emulator.py). No part of the library that runs the
// project's kernels.
#include <cstring>
#include <string>

#include "emulator.h"

namespace {

using torchrec_dyn::ptx::Kernel;
using torchrec_dyn::ptx::Module;

thread_local std::string text;  // what the last function that returns text has returned

Kernel& kernel_of(void* module, const char* name) { return *static_cast<Module*>(module)->kernels.at(name); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Returns null if the text is refused; ptx_text() says why.
void* ptx_parse(const char* source) {
  try {
    return torchrec_dyn::ptx::parse(source).release();
  } catch (const std::exception& error) {
    text = error.what();
    return nullptr;
  }
}

void ptx_free(void* module) { delete static_cast<Module*>(module); }
const char* ptx_text() { return text.c_str(); }

// extents: of the grid and of a block.
int ptx_launch(void* module, const char* name, const unsigned* extents, void* const* arguments, size_t shared_bytes) {
  return torchrec_dyn::ptx::launch(
      kernel_of(module, name),
      {{extents[0], extents[1], extents[2]}, {extents[3], extents[4], extents[5]}, arguments, shared_bytes});
}

void* ptx_variable(void* module, const char* name, size_t* bytes) {
  const torchrec_dyn::ptx::Variable variable = static_cast<Module*>(module)->variables.at(name);
  *bytes = variable.bytes;
  return variable.memory;
}

// One line for each instruction: its line, the times it was executed, its text.
const char* ptx_executed(void* module, const char* name) {
  text.clear();
  for (const auto& each : torchrec_dyn::ptx::executed(kernel_of(module, name)))
    text += std::to_string(each.line) + "\t" + std::to_string(each.times) + "\t" + each.text + "\n";
  return text.c_str();
}

// One line for each instruction that is not supported, of all kernels.
const char* ptx_unsupported(void* module) {
  text.clear();
  for (const auto& [name, kernel] : static_cast<Module*>(module)->kernels)
    for (const std::string& each : torchrec_dyn::ptx::unsupported(*kernel)) text += each + "\n";
  return text.c_str();
}

// Launches, threads, the most blocks; threads of the launch bounds, bytes of shared and local memory and parameters.
void ptx_facts(void* module, const char* name, unsigned long long* numbers) {
  const Kernel& kernel = kernel_of(module, name);
  const auto counts = torchrec_dyn::ptx::launch_counts(kernel);
  const auto facts = torchrec_dyn::ptx::facts(kernel);
  const unsigned long long all[] = {
      counts.launches,    counts.threads,    counts.most_blocks,   static_cast<unsigned long long>(facts.max_threads),
      facts.shared_bytes, facts.local_bytes, facts.parameter_bytes};
  std::memcpy(numbers, all, sizeof all);
}

// Refuses accesses within [begin, end); an empty range: none.
void ptx_refuse_range(size_t begin, size_t end) {
  static size_t refused_begin, refused_end;
  refused_begin = begin, refused_end = end;
  if (begin == end) return torchrec_dyn::ptx::set_range_check(nullptr);
  torchrec_dyn::ptx::set_range_check([](uintptr_t address, size_t bytes, bool) -> const char* {
    return address < refused_end && address + bytes > refused_begin ? "a refused range" : nullptr;
  });
}

}  // extern "C"
#pragma GCC visibility pop
