#!/usr/bin/env bash
# The tests and benchmarks of a machine with a GPU and without a network, in the root of this repository:
#   benchmarks/gpu_side.sh BUNDLE OUT [build tests memcheck bench]
# BUNDLE: the folder that benchmarks/gpu_bundle.py wrote. OUT: folder for logs and results. The last words choose steps;
# without them all run. Each step writes OUT/<step>.log; a step that fails does not stop the others.
set -uo pipefail
bundle=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/.."
shift 2
steps=${*:-build tests memcheck bench}
mkdir -p "$out" build/gpu_site
tar xJf "$bundle/site.tar.xz" -C build/gpu_site || exit 1
export PYTHONPATH=$PWD/build/gpu_site:$PWD TORCHREC_DYN_ANY_VERSION=1 PYTHONUNBUFFERED=1
pytest="python3 -m pytest -q -p no:cacheprovider --override-ini=addopts= tests/ops tests/storage tests/table"

build() {
  python3 setup.py -q build_ext --inplace && TORCHREC_DYN_BUILD=simt python3 setup.py -q build_ext --build-lib build/simt &&
    python3 -c 'import torch, torchrec_dyn; print(torch.__version__, torch.cuda.get_device_name(), torchrec_dyn._C.__file__)'
}
# Every test that runs on the fixture `device`, on the GPU. The other one reads how much memory the GPU has left, so it
# runs alone.
tests() {
  $pytest -n 8 -k "cuda and not block_of_a_gpu" && $pytest -k block_of_a_gpu
}
# Shared memory is CUB's alone, and races in global memory are ThreadSanitizer's (csrc/sanitize/run).
memcheck() {
  compute-sanitizer --tool memcheck --error-exitcode 1 $pytest -k "cuda and (id_map or contract or rows)" -x
}
bench() { python3 benchmarks/bench_gpu.py --rounds 9 --results "$out"; }

failed=
for step in $steps; do
  echo "== $step: $(date +%T)"
  $step >"$out/$step.log" 2>&1 || failed="$failed $step"
  tail --lines 5 "$out/$step.log"
done
echo "== $(date +%T): ${failed:+failed:$failed}${failed:-all steps passed}"
[ -z "$failed" ]
