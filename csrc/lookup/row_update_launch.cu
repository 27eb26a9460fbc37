#include "lookup/row_update_kernels.h"
#include "simt_cuda.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::KeyIds<uint32_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::KeyIds<uint64_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReportWrongUpdate);
TORCHREC_DYN_LAUNCH(torchrec_dyn::KeySenders<uint32_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::KeySenders<uint64_t>);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CountSenders);

namespace torchrec_dyn::simt {

#define TORCHREC_DYN_LAUNCH_UPDATE(Key, Shape)                                        \
  template void tiles(const Queue&, int64_t, const SumPieces<Key, Shape>&);           \
  template void tiles(const Queue&, int64_t, const UpdateRows<float, Key, Shape>&);   \
  template void tiles(const Queue&, int64_t, const UpdateRows<Float16, Key, Shape>&); \
  template void tiles(const Queue&, int64_t, const UpdateRows<BFloat16, Key, Shape>&)

TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, Tile16);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, Tile32);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, Tile64);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, Tile128);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, WideTile);
TORCHREC_DYN_LAUNCH_UPDATE(uint32_t, AnyTile);
TORCHREC_DYN_LAUNCH_UPDATE(uint64_t, AnyTile);

}  // namespace torchrec_dyn::simt
