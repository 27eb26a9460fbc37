#include "lookup/pooling_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {
namespace {

// Macros take no comma.
template <typename T>
using PoolPlainToFloat = PoolBags<T, float, true>;
template <typename T>
using PoolPlainToFloat16 = PoolBags<T, Float16, true>;
template <typename T>
using PoolPlainToBFloat16 = PoolBags<T, BFloat16, true>;
template <typename T>
using PoolAnyToFloat = PoolBags<T, float, false>;
template <typename T>
using PoolAnyToFloat16 = PoolBags<T, Float16, false>;
template <typename T>
using PoolAnyToBFloat16 = PoolBags<T, BFloat16, false>;

}  // namespace
}  // namespace torchrec_dyn

TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolPlainToFloat<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolPlainToFloat<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolPlainToFloat<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolPlainToFloat16<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolPlainToFloat16<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolPlainToFloat16<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolPlainToBFloat16<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolPlainToBFloat16<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolPlainToBFloat16<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolAnyToFloat<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolAnyToFloat<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolAnyToFloat<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolAnyToFloat16<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolAnyToFloat16<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolAnyToFloat16<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolAnyToBFloat16<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolAnyToBFloat16<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::PoolAnyToBFloat16<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReportWrongBags<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReportWrongBags<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReportWrongBags<torchrec_dyn::BFloat16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::DotRows<float>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::DotRows<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::DotRows<torchrec_dyn::BFloat16>);
