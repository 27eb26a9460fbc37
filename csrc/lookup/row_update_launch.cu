#include "lookup/row_update_kernels.h"
#include "simt_cuda.h"

TORCHREC_DYN_LAUNCH(torchrec_dyn::KeyIds);
TORCHREC_DYN_LAUNCH(torchrec_dyn::ReportWrongUpdate);
TORCHREC_DYN_LAUNCH(torchrec_dyn::KeySenders);
TORCHREC_DYN_LAUNCH(torchrec_dyn::CountSenders);
TORCHREC_DYN_LAUNCH_TILES(torchrec_dyn::SumPieces);
TORCHREC_DYN_LAUNCH_TILES(torchrec_dyn::UpdateRows<float>);
TORCHREC_DYN_LAUNCH_TILES(torchrec_dyn::UpdateRows<torchrec_dyn::Float16>);
TORCHREC_DYN_LAUNCH_TILES(torchrec_dyn::UpdateRows<torchrec_dyn::BFloat16>);
