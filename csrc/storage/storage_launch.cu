#include "simt_cuda.h"
#include "storage/canonical_ids_kernels.h"
#include "storage/collect_new_kernels.h"
#include "storage/content_sum_kernels.h"
#include "storage/id_map_kernels.h"
#include "storage/row_marks_kernels.h"
#include "storage/row_store_kernels.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(WriteIdsOfRows, CountCells, CountInside, ListInside, UnmixListed);

TORCHREC_DYN_LAUNCH(ClaimWords, CountFirsts, ReadOffsets, ListNew);

TORCHREC_DYN_LAUNCH(SumUnits<Unit16, uint32_t>, SumUnits<uint32_t, uint32_t>, SumUnits<Unit16, uint16_t>,
                    SumUnits<uint32_t, uint16_t>, SumUnits<uint16_t, uint16_t>, AddPartialSums);

TORCHREC_DYN_LAUNCH(MixIds, FindRows, CheckRows, InsertIds, CopySlots, FindLeaving, MarkLeaving, FirstOfRun, CloseGaps,
                    SumProbeLengths);

TORCHREC_DYN_LAUNCH(CheckMarkedRows, MarkRows);

TORCHREC_DYN_LAUNCH(FindRowOutside, InitRows<float>, InitRows<Float16>, InitRows<BFloat16>, GatherRows<Unit16>,
                    GatherRows<uint32_t>, GatherRows<uint16_t>, FindLastPositions, ScatterRows<Unit16>,
                    ScatterRows<uint32_t>, ScatterRows<uint16_t>);

}  // namespace torchrec_dyn
