#include "lookup/row_cache_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(FindMissing, PlanEvictions, CountAges, AddAges, ChooseAges, CountTies, ChooseRows, FreeFrames,
                    AssignFrames, FinishPlans, WritePlaces);
TORCHREC_DYN_LAUNCH_TILES(WriteBackRows);
TORCHREC_DYN_LAUNCH_TILES(LoadRows);

}  // namespace torchrec_dyn
