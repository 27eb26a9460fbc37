// The hash of this process, for hash tables that live for one call.
#pragma once

#include <random>

#include "slot_hash.h"

namespace torchrec_dyn {

// Drawn once, from the system's generator. A forked process keeps it.
inline const SlotHash& process_hash() {
  static const SlotHash hash = [] {
    std::random_device words;
    return SlotHash::of(static_cast<int64_t>(uint64_t{words()} << 32 | words() | 1));
  }();
  return hash;
}

}  // namespace torchrec_dyn
