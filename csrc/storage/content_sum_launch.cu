#include "simt_cuda.h"
#include "storage/content_sum_kernels.h"

namespace torchrec_dyn {
namespace {

// Macros take no comma.
template <typename Unit>
using SumWords = SumUnits<Unit, uint32_t>;
template <typename Unit>
using SumHalves = SumUnits<Unit, uint16_t>;

}  // namespace
}  // namespace torchrec_dyn

TORCHREC_DYN_LAUNCH(torchrec_dyn::SumWords<torchrec_dyn::Unit16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::SumWords<uint32_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::SumHalves<torchrec_dyn::Unit16>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::SumHalves<uint32_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::SumHalves<uint16_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::AddPartialSums);
