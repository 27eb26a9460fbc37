#include "lookup/pool_into_kernels.h"
#include "lookup/pooling_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

#define TORCHREC_DYN_LAUNCH_POOLING(T, Out) \
  TORCHREC_DYN_LAUNCH(PoolBags<T, Out, true>, PoolBags<T, Out, false>, PoolNewBags<T, Out>, PoolShownBags<T, Out>)
#define TORCHREC_DYN_LAUNCH_BAGS(T)         \
  TORCHREC_DYN_LAUNCH_POOLING(T, float);    \
  TORCHREC_DYN_LAUNCH_POOLING(T, Float16);  \
  TORCHREC_DYN_LAUNCH_POOLING(T, BFloat16); \
  TORCHREC_DYN_LAUNCH(ReportWrongBags<T>, DotRows<T>, DotShownRows<T>)

TORCHREC_DYN_LAUNCH_BAGS(float);
TORCHREC_DYN_LAUNCH_BAGS(Float16);
TORCHREC_DYN_LAUNCH_BAGS(BFloat16);

}  // namespace torchrec_dyn
