#include "lookup/pool_into_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {
namespace {

// Macros take no comma.
template <typename T>
using PoolNewToFloat = PoolNewBags<T, float>;
template <typename T>
using PoolNewToFloat16 = PoolNewBags<T, Float16>;
template <typename T>
using PoolNewToBFloat16 = PoolNewBags<T, BFloat16>;

}  // namespace
}  // namespace torchrec_dyn

TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolNewToFloat<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolNewToFloat<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolNewToFloat<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolNewToFloat16<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolNewToFloat16<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolNewToFloat16<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolNewToBFloat16<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolNewToBFloat16<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolNewToBFloat16<torchrec_dyn::BFloat16>);
