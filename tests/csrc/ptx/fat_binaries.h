// What nvcc's object files hand to the CUDA runtime when the library is loaded: texts of PTX, and which function of the
// host stands for which kernel or variable. A text is parsed when one of its kernels or variables is first used.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulator.h"

namespace torchrec_dyn::ptx {

class FatBinary {
 public:
  // `wrapper`: what nvcc gives to __cudaRegisterFatBinary. Ends the process if it holds no PTX, or compressed PTX.
  explicit FatBinary(const void* wrapper);

  // Ends the process, with the reason, if the text cannot be parsed.
  Module& module();

 private:
  std::string text_;
  std::unique_ptr<Module> module_;
};

// All fat binaries of the library. Never destroyed: kernels may run while the process ends.
class FatBinaries {
 public:
  static FatBinaries& shared();

  FatBinary* add(const void* wrapper);
  void name_kernel(const void* stub, FatBinary* binary, const char* name);
  void name_variable(const void* shadow, FatBinary* binary, const char* name);

  // Return null for addresses that were not named.
  Kernel* kernel(const void* stub);
  const Variable* variable(const void* shadow);

  // Of the PTX, as a number: 80 for sm_80. The emulated GPU has it.
  int compute_capability();

  // Every module, parsed.
  std::vector<Module*> modules();

 private:
  struct Name {
    FatBinary* binary;
    std::string name;
  };

  std::vector<std::unique_ptr<FatBinary>> binaries_;
  std::map<const void*, Name> kernels_;
  std::map<const void*, Name> variables_;
};

}  // namespace torchrec_dyn::ptx
