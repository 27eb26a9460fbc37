#!/usr/bin/env bash
# The tests and benchmarks of a machine with a GPU, in the root of this repository (docs/dev/gpu.md):
#   benchmarks/gpu_side.sh BUNDLE OUT [build golden first tests real memcheck memcheck_tables initcheck racecheck train several bench bench_train host_memory]
# BUNDLE: the folder that benchmarks/gpu_bundle.py wrote, for a machine without a network; "installed": python3 has the
# packages. OUT: folder for logs and results. The last words choose steps; without them all run. Each step writes
# OUT/<step>.log; a step that fails does not stop the others. The last line names those that failed.
set -uo pipefail
every=(build golden first tests real memcheck memcheck_tables initcheck racecheck train several bench bench_train host_memory)
[ $# -ge 2 ] || { echo "gpu_side: expected BUNDLE OUT [${every[*]}], got: $*" >&2; exit 2; }
bundle=$1
[ "$bundle" = installed ] || bundle=$(realpath "$bundle") || exit 2
out=$(realpath -m "$2")
shift 2
steps=("${@:-${every[@]}}")
for step in "${steps[@]}"; do
  [[ " ${every[*]} " == *" $step "* ]] || { echo "gpu_side: expected steps of ${every[*]}, got $step" >&2; exit 2; }
done
cd "$(dirname "$0")/.." || exit 2
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
if [ "$bundle" != installed ]; then
  mkdir -p build/gpu_site
  tar xJf "$bundle/site.tar.xz" -C build/gpu_site || exit 2
  if [ -e "$bundle/tbe.tar.xz" ]; then tar xJf "$bundle/tbe.tar.xz" -C build/gpu_site || exit 2; fi
  export PYTHONPATH=$PWD/build/gpu_site:$PWD TORCHREC_DYN_ANY_VERSION=1
fi
rooms=(tests/ops tests/storage tests/life tests/table tests/lookup tests/modules tests/layers)
rooms+=(tests/ranks tests/sharding tests/distributed tests/state_dict tests/checkpoint tests/migration)
every_test=(python3 -m pytest -q -p no:cacheprovider --override-ini=addopts= --continue-on-collection-errors)
pytest=("${every_test[@]}" -m needs_cuda)

# Without a GPU, or kernels for it, all tests that need them would be skipped.
has_kernels() {
  python3 - <<'END'
import torch, torchrec_dyn
kernels = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
assert any(name.startswith("torchrec_dyn::") for name in kernels), "expected CUDA kernels in the extension, got none"
print(torch.__version__, torch.cuda.get_device_name(), torchrec_dyn._C.__file__)
END
}

build() {
  nvidia-smi
  python3 setup.py -q build_ext --inplace && TORCHREC_DYN_BUILD=simt python3 setup.py -q build_ext --build-lib build/simt &&
    has_kernels
}
# The bits that are pinned for all devices.
golden() {
  has_kernels && "${pytest[@]}" -n 4 tests/ops/test_hash_golden.py tests/storage/test_initializers.py \
    tests/life/test_admission_chance.py tests/ops/test_content_ops.py tests/ops/test_row_rounding.py tests/ops/test_row_update.py
}
# What other tests rely on, and only a GPU can show (docs/dev/gpu.md).
first() { has_kernels && "${pytest[@]}" tests/sharding/test_first_on_a_gpu.py; }
# Every test that runs on the fixture `device`, on the GPU. The other one reads how much memory the GPU has left, so it
# runs alone.
tests() {
  local failed=0
  has_kernels || return
  "${pytest[@]}" -n 8 -k "not block_of_a_gpu" "${rooms[@]}" || failed=1
  "${pytest[@]}" -k block_of_a_gpu tests/storage || failed=1
  return "$failed"
}
# The tests of the mock device, on the GPU in its place: host code on real kernels, streams and memory.
real() {
  local files limit=()
  mapfile -t files < <(grep -rlE "mock_device|device_twins|sharded_twins" --include="test_*.py" tests)
  if python3 -c "import pytest_timeout" 2>/dev/null; then limit=(--timeout=120); fi
  has_kernels && TORCHREC_DYN_REAL_DEVICE=1 "${every_test[@]}" -n 4 -m "not needs_cuda" "${limit[@]}" "${files[@]}"
}
# Each tensor has memory of its own, so that no access beyond a tensor hits the next one unseen. racecheck sees shared
# memory, which beside CUB only the update uses; races in global memory are ThreadSanitizer's (tests/csrc/run).
sanitized() {
  has_kernels && PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 1 \
    "${pytest[@]}" -x -k "$2" "${@:3}"
}
ops=(tests/ops tests/storage)
memcheck() { sanitized memcheck "id_map or contract or rows or row_update or scores" "${ops[@]}"; }
racecheck() { sanitized racecheck "row_update" tests/ops; }
initcheck() { sanitized initcheck "id_map or contract or rows or row_update or scores" "${ops[@]}"; }
# Training of a table, whose blocks are in ranges and then are not. The last page of a range is 2 MiB, whatever the rows
# in it: memcheck sees what is behind the rows only without ranges.
memcheck_tables() { sanitized memcheck "with_or_without_ranges" tests/table; }
# The same models on both devices: equal rows, and AUCs that differ by rounding only. The second is sharded: nccl at
# world size 1.
train() {
  has_kernels || return
  for device in cpu cuda; do
    python3 examples/mixed_dimensions.py --device "$device" --kinds full block mult | tee "$out/train.$device" || return
  done
  paste "$out/train.cpu" "$out/train.cuda" | awk 'NR > 1 && ($2 != $7 || ($4 - $9) ^ 2 > 1e-4) { print "differs: " $0; bad = 1 }
    END { exit bad || NR < 4 }' || return
  for device in cpu cuda; do
    python3 examples/train_dlrm.py --device "$device" --world-size 1 --json "$out/dlrm.$device" || return
  done
  diff <(grep '"C[0-9]' "$out/dlrm.cpu") <(grep '"C[0-9]' "$out/dlrm.cuda") &&
    grep --no-filename '"auc"' "$out/dlrm.cpu" "$out/dlrm.cuda" | awk '{ sub(",", ""); auc[NR] = $2 }
      END { exit NR != 2 || (auc[1] - auc[2]) ^ 2 > 1e-4 }'
}
# Needs two GPUs or more: nccl between ranks, against gloo on the CPU.
several() { has_kernels && python3 benchmarks/several_gpus.py; }
bench() { has_kernels && python3 benchmarks/bench_gpu.py --rounds 9 --results "$out"; }
bench_train() { has_kernels && python3 benchmarks/bench_gpu_train.py --rounds 9 --results "$out"; }
host_memory() { has_kernels && python3 benchmarks/bench_host_memory.py --results "$out"; }

failed=()
for step in "${steps[@]}"; do
  echo "== $step: $(date +%T)"
  "$step" >"$out/$step.log" 2>&1 || failed+=("$step")
  tail --lines 5 "$out/$step.log"
done
rm -f "$out"/train.cpu "$out"/train.cuda "$out"/dlrm.cpu "$out"/dlrm.cuda
echo "== $(date +%T): ${failed[*]:+failed: }${failed[*]:-all steps passed}"
[ ${#failed[@]} -eq 0 ]
