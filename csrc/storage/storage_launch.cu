#include "simt_cuda.h"
#include "storage/canonical_ids_kernels.h"
#include "storage/collect_new_kernels.h"
#include "storage/content_sum_kernels.h"
#include "storage/id_map_kernels.h"
#include "storage/row_marks_kernels.h"
#include "storage/row_store_kernels.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(WriteIdsOfRows);
TORCHREC_DYN_LAUNCH(CountCells);
TORCHREC_DYN_LAUNCH(CountInside);
TORCHREC_DYN_LAUNCH(ListInside);
TORCHREC_DYN_LAUNCH(UnmixListed);

TORCHREC_DYN_LAUNCH(ClaimWords);
TORCHREC_DYN_LAUNCH(CountFirsts);
TORCHREC_DYN_LAUNCH(ReadOffsets);
TORCHREC_DYN_LAUNCH(ListNew);

TORCHREC_DYN_LAUNCH(SumUnits<Unit16, uint32_t>);
TORCHREC_DYN_LAUNCH(SumUnits<uint32_t, uint32_t>);
TORCHREC_DYN_LAUNCH(SumUnits<Unit16, uint16_t>);
TORCHREC_DYN_LAUNCH(SumUnits<uint32_t, uint16_t>);
TORCHREC_DYN_LAUNCH(SumUnits<uint16_t, uint16_t>);
TORCHREC_DYN_LAUNCH(AddPartialSums);

TORCHREC_DYN_LAUNCH(MixIds);
TORCHREC_DYN_LAUNCH(FindRows);
TORCHREC_DYN_LAUNCH(CheckRows);
TORCHREC_DYN_LAUNCH(InsertIds);
TORCHREC_DYN_LAUNCH(MoveSlots);
TORCHREC_DYN_LAUNCH(EmptyMoved);
TORCHREC_DYN_LAUNCH(FindLeaving);
TORCHREC_DYN_LAUNCH(MarkLeaving);
TORCHREC_DYN_LAUNCH(FirstOfRun);
TORCHREC_DYN_LAUNCH(CloseGaps);
TORCHREC_DYN_LAUNCH(SumProbeLengths);
TORCHREC_DYN_LAUNCH(CheckNewIndex);
TORCHREC_DYN_LAUNCH(FillNew);

TORCHREC_DYN_LAUNCH(CheckMarkedRows);
TORCHREC_DYN_LAUNCH(MarkRows);

TORCHREC_DYN_LAUNCH(FindRowOutside);
TORCHREC_DYN_LAUNCH(InitRows<float>);
TORCHREC_DYN_LAUNCH(InitRows<Float16>);
TORCHREC_DYN_LAUNCH(InitRows<BFloat16>);
TORCHREC_DYN_LAUNCH(GatherRows<Unit16>);
TORCHREC_DYN_LAUNCH(GatherRows<uint32_t>);
TORCHREC_DYN_LAUNCH(GatherRows<uint16_t>);
TORCHREC_DYN_LAUNCH(FindLastPositions);
TORCHREC_DYN_LAUNCH(ScatterRows<Unit16>);
TORCHREC_DYN_LAUNCH(ScatterRows<uint32_t>);
TORCHREC_DYN_LAUNCH(ScatterRows<uint16_t>);

}  // namespace torchrec_dyn
