// What the emulator tells: errors with their place, facts of kernels, coverage.
#include <cxxabi.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "warp.h"

namespace torchrec_dyn::ptx {

void report(const std::string& text) {
  const std::string line = "ptx: " + text + "\n";
  const char* path = std::getenv("TORCHREC_DYN_PTX_REPORT");
  const int file = path == nullptr ? STDERR_FILENO : open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (file < 0) return;
  // One write: lines of several processes are not mixed.
  if (::write(file, line.data(), line.size()) < 0) std::perror("ptx: report");
  if (path != nullptr) close(file);
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

std::string hexadecimal(uint64_t number) {
  char text[20];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(number));
  return text;
}

std::string place_of(const Warp& warp, const Instruction& instruction, int lane) {
  return demangled(warp.block->grid->kernel->name) + ", block " + std::to_string(warp.block->number) + ", warp " +
         std::to_string(warp.number) + ", lane " + std::to_string(lane) + ", PTX line " +
         std::to_string(instruction.line) + " (" + instruction.text + ")";
}

void fail(int error, const Warp& warp, const Instruction& instruction, int lane, const std::string& what) {
  throw Fault{error, place_of(warp, instruction, lane) + ": " + what + "."};
}

void run_unsupported(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  fail(98, warp, instruction, first_lane(lanes),
       "expected an instruction that the emulator supports. Add it to tests/csrc/ptx");
}

KernelFacts facts(const Kernel& kernel) {
  return {kernel.name,         kernel.target,      kernel.max_threads,
          kernel.shared_bytes, kernel.local_bytes, kernel.parameter_bytes};
}

std::vector<Executed> executed(const Kernel& kernel) {
  std::vector<Executed> result;
  for (size_t i = 0; i < kernel.code.size(); ++i)
    result.push_back({kernel.code[i].line, kernel.code[i].text, kernel.executed[i]});
  return result;
}

std::vector<std::string> unsupported(const Kernel& kernel) {
  std::vector<std::string> result;
  for (const Instruction& instruction : kernel.code)
    if (instruction.run == run_unsupported) result.push_back(instruction.text);
  return result;
}

LaunchCounts launch_counts(const Kernel& kernel) { return kernel.counts; }

}  // namespace torchrec_dyn::ptx
