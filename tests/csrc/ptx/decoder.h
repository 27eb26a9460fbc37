// One instruction, from its text to its handler.
#pragma once

#include <string>
#include <string_view>

#include "operands.h"

namespace torchrec_dyn::ptx {

// `branch`: the label of a branch, else empty. What the emulator does not know becomes run_unsupported.
Instruction decode(Operands& operands, std::string_view text, int line, std::string& branch);

}  // namespace torchrec_dyn::ptx
