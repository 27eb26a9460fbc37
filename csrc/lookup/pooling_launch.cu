#include "lookup/pooling_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {
namespace {

// Macros take no comma.
template <typename T>
using PoolToFloat = PoolBags<T, float>;
template <typename T>
using PoolToFloat16 = PoolBags<T, Float16>;
template <typename T>
using PoolToBFloat16 = PoolBags<T, BFloat16>;

}  // namespace
}  // namespace torchrec_dyn

TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolToFloat<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolToFloat<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolToFloat<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolToFloat16<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolToFloat16<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolToFloat16<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolToBFloat16<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolToBFloat16<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolToBFloat16<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReportWrongBags<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReportWrongBags<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReportWrongBags<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::DotRows<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::DotRows<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::DotRows<torchrec_dyn::BFloat16>);
