#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Several GPUs of one machine: are layouts exact, does a killed rank end the job, how fast is context parallelism, and what
# did the plan say. Prints a line for each thing as it is known, and all figures as one table at the end.
#
#   bench/many_gpus.sh [--gpus N] [--program FILE] [--output DIR] [--only PARTS] [--quick]
#
#   --gpus N        ranks of the largest layout, a GPU each (default: the GPUs that nvidia-smi lists)
#   --program FILE  default build/release/farspan, which is built if it is not there
#   --output DIR    where runs and their logs go (default: a new folder under /tmp)
#   --only PARTS    of exact,killed,links,attention,speed; with commas
#   --quick         small models: tries the script, also on a CPU, where ranks are threads
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

gpus= program=build/release/farspan output= parts=exact,killed,links,attention,speed quick=
die() {
  echo "many_gpus: $1" >&2
  exit 2
}
while (($#)); do
  option=$1 value=${2:-}
  shift
  case "$option" in
    --quick) quick=1 && continue ;;
    -h | --help) sed -n '3,13s/^# \{0,1\}//p' bench/many_gpus.sh && exit 0 ;;
    --gpus) gpus=$value ;;
    --program) program=$value ;;
    --output) output=$value ;;
    --only) parts=$value ;;
    *) die "unknown argument \"$option\"" ;;
  esac
  [[ -n $value ]] || die "$option needs a value"
  shift
done
present=$(nvidia-smi -L 2>/dev/null | grep -c . || true)
gpus=${gpus:-$present}
((gpus >= 2)) || die "$gpus GPUs; this is about several (--gpus N with --quick starts N ranks on what there is)"
if ((present)); then device=cuda precision=bf16; else device=cpu precision=fp32; fi
[[ $device == cuda || -n $quick ]] || die "no GPU; --quick tries the script on a CPU"
output=${output:-$(mktemp -d /tmp/many-gpus-XXXXXX)}
mkdir -p "$output"
if [[ ! -x $program ]]; then
  cmake --preset release >"$output/build.log" && ninja -C build/release farspan >>"$output/build.log"
fi
echo "$gpus ranks on ${present:-0} GPUs, $program, logs in $output"

table=$output/table.txt
: >"$table"
row() { printf '%s\n' "$*" | tee -a "$table"; }
wanted() { [[ ,$parts, == *,$1,* ]]; }
# Numbers from JSON: `figures FILE EXPRESSION`, a Python f-string's inside, with the file's content as `it`.
figures() { python3 -c 'import json, sys; it = json.load(open(sys.argv[1])); print(eval("f" + repr(sys.argv[2])))' "$@"; }

text=$output/text
python3 -c 'import random, sys
sys.stdout.buffer.write(bytes(random.Random(1).choices(range(32, 127), k=8 << 20)))' >"$text"

# --- exact: every layout's loss, gradient norm and gradients against one rank's -----------------------------------------

small=$output/small.yaml
cat >"$small" <<YAML
model: {num_layers: 4, hidden_size: 256, num_attention_heads: 8, num_query_groups: 4, ffn_hidden_size: 704}
data: {path: $text, seq_length: 2048}
training: {device: $device, train_iters: 4, eval_iters: 0, global_batch_size: 4, precision: fp32}
YAML

verify() {  # ranks, flags
  local log="$output/verify $*.log"
  if timeout -k 5 120 "$program" verify "$small" --ranks "$1" "${@:2}" >"$log" 2>&1; then
    row "exact   $* : $(tail -1 "$log")"
  else
    row "exact   $* : FAILED, $(tail -1 "$log")"
  fi
}

if wanted exact; then
  for ((cp = 2; cp <= gpus; cp *= 2)); do
    for how in p2p all_gather a2a; do verify "$cp" --context-parallel-size "$cp" --cp-comm-type "$how"; done
    ((cp < 4)) || verify "$cp" --context-parallel-size "$cp" --cp-comm-type a2a+p2p
  done
  if ((gpus >= 4)); then
    verify 4 --tensor-model-parallel-size 2 --context-parallel-size 2
    verify 4 --context-parallel-size 2 --zero-stage 3
    verify 4 --pipeline-model-parallel-size 2 --context-parallel-size 2
  fi
fi

# --- killed: one process of the job is ended in the middle of a step ----------------------------------------------------

if wanted killed; then
  if command -v mpirun >/dev/null; then
    log=$output/killed.log
    mpirun --allow-run-as-root --oversubscribe -n "$gpus" "$program" train "$small" --context-parallel-size "$gpus" \
      --train-iters 1000000 --distributed-timeout-seconds 20 --output "$output/killed" >"$log" 2>&1 &
    job=$!
    for ((i = 0; i < 600; ++i)); do
      [[ $(grep -c . "$output/killed/metrics.jsonl" 2>/dev/null || true) -ge 5 ]] && break
      sleep 0.1
    done
    victim=$(pgrep -P "$job" -f "^$program train" | tail -1 || true)
    [[ -n $victim ]] || die "the job did not start; see $log"
    begin=${EPOCHREALTIME//[.,]/}
    kill -KILL "$victim"
    status=0
    wait "$job" || status=$?
    milliseconds=$(((${EPOCHREALTIME//[.,]/} - begin) / 1000))
    row "killed  the job ended $(printf '%d.%03d' $((milliseconds / 1000)) $((milliseconds % 1000))) s later with status $status: $(grep 'farspan: error' "$log" | tail -1)"
  else
    row "killed  not tried: no mpirun"
  fi
fi

# --- links: what NCCL brings a rank ---------------------------------------------------------------------------------------

if wanted links; then
  bench=$(dirname "$program")/bench/cuda_link_bench
  if [[ $device == cuda && -x $bench ]]; then
    if "$bench" "$gpus" 0.1 >"$output/links.txt" 2>&1; then
      while IFS= read -r line; do row "links   $line"; done <"$output/links.txt"
    else
      row "links   FAILED, $(tail -1 "$output/links.txt")"
    fi
  else
    row "links   not tried: needs GPUs and $bench"
  fi
fi

# --- attention alone: a model of one layer at 8K and 16K tokens a rank ----------------------------------------------------

if wanted attention; then
  lengths=(8192 16384)
  [[ -z $quick ]] || lengths=(512)
  for tokens in "${lengths[@]}"; do
    run=$output/attention-$tokens
    cat >"$run.yaml" <<YAML
model: {num_layers: 2, hidden_size: 2048, ffn_hidden_size: 512, num_attention_heads: 16, num_query_groups: 8, kv_channels: 128}
data: {path: $text, seq_length: $((tokens * gpus)), split: "100"}
training: {device: $device, precision: $precision, train_iters: 6, eval_iters: 0}
parallel: {context_parallel_size: $gpus}
YAML
    [[ -z $quick ]] || sed -i 's/: 2048, ffn/: 64, ffn/; s/heads: 16/heads: 4/; s/groups: 8/groups: 2/; s/channels: 128/channels: 16/' "$run.yaml"
    for how in p2p all_gather a2a; do
      if "$program" train "$run.yaml" --ranks "$gpus" --cp-comm-type "$how" --profile --output "$run-$how" >"$run-$how.log" 2>&1; then
        row "attention $tokens tokens a rank, $how: $(python3 - "$run-$how/profile.json" <<'PY'
import json, sys
ranks = json.load(open(sys.argv[1]))["ranks"]
def rate(way):
    of_ranks = []
    for rank in ranks:
        ops = [op for op in rank["ops"] if op["class"] == "attention" and ("backward" in op["op"]) == (way == "backward")]
        of_ranks.append(sum(op["flops"] for op in ops) / sum(op["seconds"] for op in ops) / 1e12)
    return min(of_ranks)
waiting = max(sum(each["seconds"] for each in rank["activities"] if each["kind"] == "waiting") for rank in ranks)
step = max(rank["seconds_per_step"] for rank in ranks)
print(f"{rate('forward'):.4g} forward, {rate('backward'):.4g} backward TFLOP/s of the slowest; waiting {waiting / step:.1%}")
PY
)"
      else
        row "attention $tokens tokens a rank, $how: FAILED, $(tail -1 "$run-$how.log")"
      fi
      rm -rf "$run-$how/checkpoints"
    done
  done
fi

# --- speed: whole steps, and what the plan expected of them ---------------------------------------------------------------

speed() {  # shape, tokens, ranks, seconds, recomputation to try, more arguments of compare_torch
  local name="$output/$1-$2-$3"
  python3 bench/compare_torch.py --sides Farspan --device "$device" --program "$program" --shapes "$1" --lens "$2" --ranks "$3" \
    --set "parallel.context_parallel_size=$3" --recompute "$5" --rounds 1 --seconds "$4" "${@:6}" \
    --keep "$name.yaml" --output "$name.json" >"$name.log" 2>&1 || true
  "$program" plan "$name.yaml" --ranks "$3" --json >"$name.plan.json" 2>>"$name.log" || true
  row "speed   $1, $2 tokens over $3: $(python3 - "$name" "$3" <<'PY'
import json, sys
name, ranks = sys.argv[1], int(sys.argv[2])
runs = json.load(open(name + ".json"))
done = [run for run in runs if "seconds" in run]
if not done:
    print("FAILED,", runs[-1]["failed"])
    sys.exit()
run, plan = done[-1], json.load(open(name + ".plan.json"))
print(f"{run['recompute']}, {run['seconds']:.4g} s a step (planned {plan['step']['seconds']:.4g}), "
      f"{run['tokens'] / run['seconds'] / ranks:.0f} tokens/s and {run['tflops'] / ranks:.4g} TFLOP/s a rank, "
      f"cp exposed {run['exposed_seconds']['cp'] / run['seconds']:.1%} "
      f"(planned {plan['step']['exposed_communication_seconds'] / plan['step']['seconds']:.1%}), "
      f"{run['peak_bytes'] / 2**30:.2f} GiB (planned {max(rank['peak_bytes'] for rank in plan['ranks']) / 2**30:.2f})")
PY
)"
}

if wanted speed; then
  if [[ -n $quick ]]; then
    for ((ranks = 1; ranks <= gpus; ranks *= 2)); do speed bytes-85m 256 "$ranks" 1 none,selective,full; done
  else
    for ((ranks = 1; ranks <= gpus; ranks *= 2)); do speed qwen3-1.7b 131072 "$ranks" 10 none,selective,full; done
    # Its weights, gradients and optimizer state are 126 GiB, more than two GPUs have room for beside the rest; shared
    # over the ranks, on two GPUs of 139 GiB 131072 tokens fit with selective recomputation and 262144 with full.
    for tokens in 131072 262144; do
      speed llama-3.1-8b "$tokens" "$gpus" 15 selective,full --set parallel.zero_stage=3
    done
  fi
fi

echo
echo "--- $table"
cat "$table"
