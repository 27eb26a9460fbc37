#include "simt_cuda.h"
#include "storage/row_store_kernels.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::FindRowOutside);
TORCHREC_DYN_LAUNCH(torchrec_dyn::InitRows<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::InitRows<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::InitRows<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::GatherRows<torchrec_dyn::Unit16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::GatherRows<uint32_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::GatherRows<uint16_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::FindLastPositions);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ScatterRows<torchrec_dyn::Unit16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ScatterRows<uint32_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ScatterRows<uint16_t>);
