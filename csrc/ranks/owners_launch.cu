#include "ranks/owners_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(FindOwners<int32_t>);
TORCHREC_DYN_LAUNCH(FindOwners<int64_t>);
TORCHREC_DYN_LAUNCH(MoveToOwners<uint16_t>);
TORCHREC_DYN_LAUNCH(MoveToOwners<uint32_t>);
TORCHREC_DYN_LAUNCH(MoveToOwners<uint64_t>);

}  // namespace torchrec_dyn
