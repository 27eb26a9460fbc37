#include "ranks/owners_kernels.h"
#include "simt_cuda.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::ReadLengths<int32_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReadLengths<int64_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FindOwners<int32_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FindOwners<int64_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::MoveToOwners<uint16_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::MoveToOwners<uint32_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::MoveToOwners<uint64_t>);
