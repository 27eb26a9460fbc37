// An emulator of PTX on the CPU: the kernels as nvcc made them, without a GPU. Its results say what the PTX does by the
// text of the PTX ISA (docs.nvidia.com/cuda/parallel-thread-execution), which later comments name by section.
//
// What it is strict about: addresses and their alignment, member masks, barriers, lanes that never meet, races. What
// it cannot show: the compiler from PTX to SASS, the memory order of a GPU, speed.
//
// Environment, read at each launch:
//   TORCHREC_DYN_PTX_SCHEDULE  how lanes and warps take turns (schedule.h): converged, random, split or mixed (the
//                              default: drawn for each launch)
//   TORCHREC_DYN_PTX_SEED      of these turns, a number; a launch draws from it and from its number in the process
//   TORCHREC_DYN_PTX_RACES     1: races are reported (races.h)
//   TORCHREC_DYN_PTX_STEPS     the most instructions of a launch, counted by warps; a launch beyond is an endless loop
//   TORCHREC_DYN_PTX_REPORT    the file that reports are added to; without it they go to stderr
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torchrec_dyn::ptx {

struct Kernel;  // program.h

struct Variable {
  void* memory;
  size_t bytes;
};

struct Module {
  Module();
  ~Module();

  std::string target;                                      // "sm_80"
  std::map<std::string, std::unique_ptr<Kernel>> kernels;  // by mangled name
  std::map<std::string, Variable> variables;               // .global and .const
};

// Reads the text of one module. Throws std::runtime_error. Instructions that the emulator does not know are errors when
// they are executed.
std::unique_ptr<Module> parse(const std::string& text);

// What a kernel says of itself.
struct KernelFacts {
  std::string name;        // mangled
  std::string target;      // of its module
  int max_threads;         // of a block, by its launch bounds; 0: none are given
  size_t shared_bytes;     // without the memory that a launch adds
  size_t local_bytes;      // of a thread
  size_t parameter_bytes;  // of all parameters
};
KernelFacts facts(const Kernel& kernel);

// The name as C++ writes it.
std::string demangled(const std::string& name);

struct Extent {
  uint32_t x, y, z;
};

struct Launch {
  Extent grid;
  Extent block;
  void* const* arguments;  // one pointer for each parameter
  size_t shared_bytes;     // beside those of the kernel
};

// Runs all threads and returns 0, or the number of a cudaError; what went wrong is reported. Launches of several host
// threads run one after the other.
//   1 invalid value, 2 no memory, 9 invalid configuration, 98 invalid device function (an instruction that is not
//   supported), 700 illegal address, 702 timeout (deadlock, endless loop), 719 assert (trap), 715 illegal instruction
//   (a rule of .sync broken), 716 misaligned address
int launch(Kernel& kernel, const Launch& launch);

// Adds a line to the report.
void report(const std::string& text);

// Asked about each access to memory that is not shared, local or a parameter, after the emulator's own checks. Returns
// null, or what is wrong. Null: nobody is asked. (Under AddressSanitizer its own marks are asked as well.)
using RangeCheck = const char* (*)(uintptr_t address, size_t bytes, bool is_write);
void set_range_check(RangeCheck check);

// Coverage: an instruction of a kernel and how often a warp executed it, over all launches of this process.
struct Executed {
  int line;  // in the text of the module
  std::string text;
  uint64_t times;
};
std::vector<Executed> executed(const Kernel& kernel);

// The instructions of a kernel that the emulator does not know, by their text.
std::vector<std::string> unsupported(const Kernel& kernel);

struct LaunchCounts {
  uint64_t launches, threads, most_blocks;
};
LaunchCounts launch_counts(const Kernel& kernel);

}  // namespace torchrec_dyn::ptx
