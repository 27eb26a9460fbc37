// The bodies of the id map (simt.h).
#pragma once

#include "mix64.h"
#include "simt.h"

namespace torchrec_dyn {

struct MixIds {
  const uint64_t* in;
  uint64_t* out;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const { out[i] = mix64(in[i]); }
};

struct UnmixIds {
  const uint64_t* in;
  uint64_t* out;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const { out[i] = unmix64(in[i]); }
};

}  // namespace torchrec_dyn
