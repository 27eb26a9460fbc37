#include "lookup/row_update_kernels.h"
#include "simt_cuda.h"

namespace torchrec_dyn {

TORCHREC_DYN_LAUNCH(KeyIds<uint32_t>, KeyIds<uint64_t>, ReportWrongUpdate, RefuseNonfinite, KeySenders<uint32_t>,
                    KeySenders<uint64_t>, CountSenders);

#define TORCHREC_DYN_LAUNCH_UPDATE_OF(Key, Shape, kVisit)                    \
  TORCHREC_DYN_LAUNCH_TILES(UpdateRows<float, Key, Shape, Visit::kVisit>);   \
  TORCHREC_DYN_LAUNCH_TILES(UpdateRows<Float16, Key, Shape, Visit::kVisit>); \
  TORCHREC_DYN_LAUNCH_TILES(UpdateRows<BFloat16, Key, Shape, Visit::kVisit>)

#define TORCHREC_DYN_LAUNCH_UPDATE(Key, Shape)      \
  TORCHREC_DYN_LAUNCH_TILES(SumPieces<Key, Shape>); \
  TORCHREC_DYN_LAUNCH_UPDATE_OF(Key, Shape, kUpdate)

TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, Tile16);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, Tile32);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, Tile64);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, Tile128);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, Tile256);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, WideTile);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, AnyTile);
TORCHREC_DYN_LAUNCH_UPDATE(uint64_t, AnyTile);
TORCHREC_DYN_LAUNCH_UPDATE_OF(uint32_t, AnyTile, kUpdateByAny);
TORCHREC_DYN_LAUNCH_UPDATE_OF(uint64_t, AnyTile, kUpdateByAny);
TORCHREC_DYN_LAUNCH_UPDATE_OF(uint32_t, AnyTile, kTry);
TORCHREC_DYN_LAUNCH_UPDATE_OF(uint64_t, AnyTile, kTry);
TORCHREC_DYN_LAUNCH_UPDATE_OF(uint32_t, AnyTile, kMeasure);
TORCHREC_DYN_LAUNCH_UPDATE_OF(uint64_t, AnyTile, kMeasure);

}  // namespace torchrec_dyn
