#include "ranks/owners_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(FindOwners<int32_t>, FindOwners<int64_t>, MoveToOwners<uint16_t>, MoveToOwners<uint32_t>,
                    MoveToOwners<uint64_t>);

}  // namespace torchrec_dyn
