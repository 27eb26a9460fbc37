#include "coverage.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "emulator.h"
#include "fat_binaries.h"

// A line for each kernel: K, target, mangled name, name, launches, most blocks of one. Then one for each of its
// instructions: times, line in the PTX, text. Tabs between them.
extern "C" [[gnu::used, gnu::visibility("default")]] void torchrec_dyn_write_coverage() {
  using namespace torchrec_dyn::ptx;
  const char* folder = std::getenv("TORCHREC_DYN_PTX_COVERAGE");
  if (folder == nullptr) return;
  std::ofstream file(std::string(folder) + "/" + std::to_string(getpid()) + ".tsv");
  for (const Module* module : FatBinaries::shared().modules()) {
    for (const auto& [name, kernel] : module->kernels) {
      const LaunchCounts counts = launch_counts(*kernel);
      file << "K\t" << module->target << '\t' << name << '\t' << demangled(name) << '\t' << counts.launches << '\t'
           << counts.most_blocks << '\n';
      for (const Executed& one : executed(*kernel)) file << one.times << '\t' << one.line << '\t' << one.text << '\n';
    }
  }
}
