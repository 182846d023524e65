#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One GPU: do the ops and every layout of thread ranks compute what a CPU does, how fast is a step beside PyTorch's, what
# does FP8 gain, what does context parallelism cost, and is the memory what was planned. Prints a line for each thing as it is
# known, and all of them as one table at the end.
#
#   bench/one_gpu.sh [--build DIR] [--output DIR] [--only PARTS] [--lens LIST] [--quick]
#
#   --build DIR   default build/release, with its tests and benchmarks
#   --output DIR  where runs and their logs go (default: a new folder under /tmp)
#   --only PARTS  of ops,ranks,sanitizer,losses,layouts,fp8,attention,context,memory_bound,speed; commas
#   --lens LIST   lengths of the comparison with PyTorch (default 8192,32768,131072)
#   --quick       short runs and small models: tries the script, also on a CPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=build/release output="" parts=ops,ranks,sanitizer,losses,layouts,fp8,attention,context,memory_bound,speed quick="" lens=8192,32768,131072
die() {
  echo "one_gpu: $1" >&2
  exit 2
}
while (($#)); do
  option=$1 value=${2:-}
  shift
  case "$option" in
    --quick) quick=1 && continue ;;
    -h | --help) sed -n '3,14s/^# \{0,1\}//p' bench/one_gpu.sh && exit 0 ;;
    --build) build=$value ;;
    --output) output=$value ;;
    --only) parts=$value ;;
    --lens) lens=$value ;;
    *) die "unknown argument \"$option\"" ;;
  esac
  [[ -n $value ]] || die "$option needs a value"
  shift
done
if nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
[[ $device == cuda || -n $quick ]] || die "no GPU; --quick tries the script on a CPU"
build=$(realpath -m -- "$build")
program=$build/farspan
[[ -x $program ]] || die "$program is not there; scripts/test builds it, --build DIR names another folder"
output=${output:-$(mktemp -d /tmp/one-gpu-XXXXXX)}
mkdir -p "$output"
output=$(realpath -- "$output")
export FARSPAN_PROGRAM=$program FARSPAN_SOURCE=$PWD FARSPAN_TEST_DEVICE=$device OMP_NUM_THREADS=2
echo "$device, $build, logs in $output"

table=$output/table.txt
: >"$table"
row() { printf '%s\n' "$*" | tee -a "$table"; }
wanted() { [[ ,$parts, == *,$1,* ]]; }

# tests KIND PARALLEL SECONDS [SKIPPED]: the test programs of a kind, several at a time, each for so long at most.
tests() {
  local program
  # shellcheck disable=SC2016 # expanded by the inner shell
  find "$build/tests" -maxdepth 1 -name "test_$1*" -type f -executable | grep -vE "${4:-^$}" | sort |
    xargs -P "$2" -I{} bash -c '
      name=$(basename {}); begin=$SECONDS; status=0
      timeout -k 5 '"$3"' {} --gtest_brief=1 >"'"$output"'/$name.log" 2>&1 || status=$?
      echo "$status $((SECONDS - begin)) $name $(grep -E "^\[  (PASSED|FAILED)  \] [0-9]+ test" "'"$output"'/$name.log" | tail -1 | tr -d "[]")"
    ' >"$output/tests-$1.txt"
  row "$1: $(grep -c '^0 ' "$output/tests-$1.txt" || true) of $(grep -c . "$output/tests-$1.txt") test programs pass on $device"
  while read -r status seconds name said; do
    [[ $status == 0 ]] || row "$1: $name ended with $status after $seconds s: $said"
  done <"$output/tests-$1.txt"
}

# --- ops and ranks: the bodies of the CPU's tests --------------------------------------------------------------------------

if wanted ops; then tests ops 4 120; fi
if wanted ranks; then
  tests ranks 3 240 cuda_observe
  tests ranks_cuda_observe 1 60  # measures times, so alone
fi

# --- sanitizer: small cases ------------------------------------------------------------------------------------------------

sanitize() {  # tool, program, filter
  local log=$output/sanitizer-$1-$2.log
  local status=0
  timeout 120 compute-sanitizer --tool "$1" --error-exitcode 9 "$build/tests/$2" --gtest_brief=1 --gtest_filter="$3" \
    >"$log" 2>&1 || status=$?
  row "sanitizer: $1 $2 $3: status $status, $(grep -E 'SUMMARY' "$log" | tail -1)"
}

if wanted sanitizer; then
  if [[ $device == cuda ]] && command -v compute-sanitizer >/dev/null; then
    sanitize memcheck test_ops_all_ops '*NoTokens*'
    sanitize memcheck test_ops_fp8 '*BothCopies*:*NoTokens*'
    sanitize memcheck test_ops_attention_tiles '*OneTile*:*Tails*'
    sanitize memcheck test_ops_attention_contract '*'
    sanitize memcheck test_ops_gemm '*EmptySizes*:*ForwardAddsResidual*'
    for op in cross_entropy rms_norm rms_norm_rope swiglu rope dropout bias; do
      sanitize memcheck "test_ops_$op" '-*Many*'
    done
    # Not attention's: for racecheck a lane that arrives at a barrier behind __syncwarp speaks for itself alone.
    for op in cross_entropy rms_norm rms_norm_rope; do sanitize racecheck "test_ops_$op" '-*Many*'; done
  else
    row "sanitizer: not tried: no compute-sanitizer or no GPU"
  fi
fi

# --- losses: 20 steps on real text ---------------------------------------------------------------------------------------

text=/usr/share/common-licenses
[[ -d $text ]] || text=$PWD/docs
small() {  # name, device, precision, steps
  cat >"$output/$1.yaml" <<YAML
model: {num_layers: 4, hidden_size: 256, num_attention_heads: 4, num_query_groups: 2, kv_channels: 64, ffn_hidden_size: 704, untie_embeddings_and_output_weights: false}
data: {path: $text, seq_length: 1024, split: "95,5"}
training: {device: $2, precision: $3, train_iters: $4, eval_iters: 0, micro_batch_size: 1, global_batch_size: 1, log_interval: 100}
optimizer: {lr: 1.5e-3, min_lr: 1.0e-4, lr_decay_style: cosine, lr_warmup_iters: 20, lr_decay_iters: 280, weight_decay: 0.1, clip_grad: 1.0}
YAML
  "$program" train "$output/$1.yaml" --ranks 1 --output "$output/$1" >"$output/$1.log" 2>&1 ||
    row "losses: $1 FAILED: $(tail -1 "$output/$1.log")"
}
compare_losses() {  # words, run, run
  row "losses: $1: $(python3 - "$output/$2/metrics.jsonl" "$output/$3/metrics.jsonl" <<'PY'
import json, sys
def steps(path):
    return [json.loads(line) for line in open(path) if '"kind":"train"' in line]
a, b = steps(sys.argv[1]), steps(sys.argv[2])
worst = max(abs(x["loss"] - y["loss"]) / abs(x["loss"]) for x, y in zip(a, b))
tail = [sum(run["loss"] for run in runs[-20:]) / len(runs[-20:]) for runs in (a, b)]
planned = all(run["peak_memory_bytes"] == run["planned_memory_bytes"] for run in b)
print(f"{len(b)} steps, largest difference of a step {worst:.2g} of the loss, last 20 {tail[0]:.5f} and {tail[1]:.5f}"
      f" ({tail[1] / tail[0] - 1:+.2%}); memory {'as' if planned else 'NOT as'} planned")
PY
)"
}

if wanted losses; then
  small cpu-fp32 cpu fp32 20
  for precision in fp32 bf16; do
    small "$device-$precision" "$device" "$precision" 20
    compare_losses "cpu fp32 and $device $precision" cpu-fp32 "$device-$precision"
  done
fi

# --- layouts: thread ranks that share the GPU, against one rank ------------------------------------------------------------

if wanted layouts; then
  cat >"$output/layouts.yaml" <<YAML
model: {num_layers: 4, hidden_size: 256, num_attention_heads: 8, num_query_groups: 8, ffn_hidden_size: 704}
data: {path: $text, seq_length: 1024}
training: {device: $device, train_iters: 4, eval_iters: 0, global_batch_size: 4, precision: fp32}
YAML
  verify() {  # ranks, flags
    local log="$output/verify $*.log"
    timeout 120 "$program" verify "$output/layouts.yaml" --ranks "$1" "${@:2}" >"$log" 2>&1 || true
    row "layouts: $* : $(tail -1 "$log")"
  }
  for cp in 2 4 8; do
    for how in p2p all_gather a2a; do verify "$cp" --context-parallel-size "$cp" --cp-comm-type "$how"; done
    ((cp < 4)) || verify "$cp" --context-parallel-size "$cp" --cp-comm-type a2a+p2p
  done
  verify 2 --tensor-model-parallel-size 2
  verify 2 --pipeline-model-parallel-size 2
  verify 2 --zero-stage 3
  verify 4 --tensor-model-parallel-size 2 --context-parallel-size 2 --precision fp8
fi

# --- fp8 -------------------------------------------------------------------------------------------------------------------

compare() {  # name, flags of compare_torch.py
  python3 bench/compare_torch.py --program "$program" --output "$output/$1.json" "${@:2}" 2>&1 | tee "$output/$1.log"
  grep -E 'tokens$|s a step|ratio|times' "$output/$1.log" | sed "s/^/$1: /" >>"$table" || true
}
seconds=10 rounds=2
[[ -z $quick ]] || seconds=1 rounds=1

if wanted fp8; then
  # From the start a curve says little: when a model learns to copy is chance, and runs of bf16 that differ in the order of
  # their sums alone part by percents (docs/performance.md). So a model that has learnt it goes on, in either precision.
  before=400 steps=200
  [[ -z $quick ]] || before=3 steps=3
  python3 - "$output/source" <<'PY'
import pathlib, sys, sysconfig
sources = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
pathlib.Path(sys.argv[1]).write_bytes(b"".join(path.read_bytes() for path in sources)[: 64 << 20])
PY
  curve() {  # name, precision, micro-batch, steps, flags
    cat >"$output/$1.yaml" <<YAML
model: {num_layers: 12, hidden_size: 768, num_attention_heads: 12, num_query_groups: 4, kv_channels: 64, ffn_hidden_size: 2048, untie_embeddings_and_output_weights: false}
data: {path: $output/source, seq_length: 2048, split: "100"}
training: {device: $device, precision: $2, train_iters: $4, eval_iters: 0, micro_batch_size: $3, global_batch_size: 32, log_interval: 100}
optimizer: {lr: 6.0e-4, min_lr: 6.0e-5, lr_decay_style: cosine, lr_warmup_iters: 20, lr_decay_iters: 600, weight_decay: 0.1, clip_grad: 1.0}
YAML
    "$program" train "$output/$1.yaml" --ranks 1 --output "$output/$1" "${@:5}" >"$output/$1.log" 2>&1 ||
      row "fp8: $1 FAILED: $(tail -1 "$output/$1.log")"
  }
  if [[ $device == cpu ]]; then  # a few steps of the small model try the script
    for precision in bf16 fp8; do small "curve-$precision" "$device" "$precision" "$steps"; done
  else
    curve curve-before bf16 16 "$before" --save "$output/before"
    curve curve-bf16 bf16 16 $((before + steps)) --load "$output/before"
    curve curve-again bf16 8 $((before + steps)) --load "$output/before"
    curve curve-fp8 fp8 16 $((before + steps)) --load "$output/before"
    compare_losses "bf16 with micro-batches of 16 rows and of 8" curve-bf16 curve-again
  fi
  compare_losses "$device bf16 and fp8" curve-bf16 curve-fp8
  if [[ $device == cuda ]]; then
    compare fp8 --shapes qwen3-1.7b --lens "${lens%,131072}" --rounds "$rounds" --seconds "$seconds" --set training.precision=fp8
  fi
fi

# --- attention, a block and over the ranks of cp 8; ops that memory bounds ----------------------------------------------------

if [[ $device == cuda ]]; then
  if wanted attention; then
    timeout 200 "$build/bench/cuda_attention_bench" 2>&1 | tee "$output/attention.log" | sed 's/^/attention: /' | tee -a "$table"
  fi
  if wanted context; then
    timeout 300 "$build/bench/cuda_context_attention_bench" 2>&1 | tee "$output/context.log" | sed 's/^/context: /' | tee -a "$table"
  fi
  if wanted memory_bound; then
    for bench in cuda_ops_bench cuda_loss_bench; do
      timeout 200 "$build/bench/$bench" 2>&1 | tee "$output/$bench.log" | sed 's/^/memory-bound: /' | tee -a "$table"
    done
  fi
fi

# --- speed: beside PyTorch ---------------------------------------------------------------------------------------------------

if wanted speed; then
  if [[ $device == cuda ]]; then
    compare speed --shapes qwen3-1.7b,llama-3.2-1b --lens "$lens" --recompute none,selective,full --rounds "$rounds" --seconds "$seconds"
  else
    compare speed --device cpu --shapes bytes-85m --lens 256 --rounds 1 --seconds 1 --sides Farspan
  fi
fi

echo
echo "--- $table"
cat "$table"
