#!/usr/bin/env bash
# Several questions on one GPU, one after the other, within a time: each answer is kept whatever happens to the next.
#
#     bench/gpu/series.sh OUT SECONDS NAME...
#
# OUT/NAME.json and OUT/NAME.log per question; names are those of the table below, worth asking in its order.
# For several GPUs start one series on each, with CUDA_VISIBLE_DEVICES; engines that start disturb others' small batches, so
# two that are to be compared are better given `width.py --beside`.
set -u

declare -A QUESTIONS=(
  # auto against stock, on the same GPU (docs/results.md)
  ["dense-large-stock"]="width.py stock --streams 128,256 --repeats 5"
  ["dense-large-auto"]="width.py auto --streams 128,256 --repeats 5"
  ["dense-small-stock"]="width.py stock --slots 256 --streams 1,8,32 --repeats 3"
  ["dense-small-auto"]="width.py auto --slots 256 --streams 1,8,32 --repeats 3"
  ["dense-large-widths"]="width.py widths --streams 128,256 --arms 3,7,auto --repeats 2 --trace"
  ["hybrid-large-stock"]="width.py stock --model qwen3-next-48 --memory 0.94 --streams 128,256 --repeats 2"
  ["hybrid-large-auto"]="width.py auto --model qwen3-next-48 --memory 0.94 --streams 128,256 --repeats 2"
  ["hybrid-small-stock"]="width.py stock --model qwen3-next-48 --memory 0.94 --slots 256 --streams 1,8,32 --tokens 640 --repeats 3"
  ["hybrid-small-auto"]="width.py auto --model qwen3-next-48 --memory 0.94 --slots 256 --streams 1,8,32 --tokens 640 --repeats 3"
  ["hybrid-large-widths"]="width.py widths --model qwen3-next-48 --memory 0.94 --streams 256,128 --arms 3,7,auto --repeats 2 --trace"
  # with torch.compile; auto with width 0 too and without; no speculation
  ["dense-compiled-stock"]="width.py stock --compiled --slots 256 --streams 128,256,192,64,32 --regimes structured,prose,alternating,hard --repeats 6"
  ["dense-compiled-plain-auto"]="width.py auto --widths 0,1,3,5,7 --compiled --slots 256 --streams 128,256,192,64,32 --regimes structured,prose,alternating,hard --repeats 6"
  ["dense-compiled-auto"]="width.py auto --compiled --slots 256 --streams 128,256,192,64,32 --regimes structured,prose,alternating,hard --repeats 6"
  ["dense-compiled-off"]="width.py off --compiled --slots 256 --streams 256,128,32,8,1 --regimes prose --repeats 3"
  # the hybrid; rows that need many repeats; width 0
  ["hybrid-compiled-stock"]="width.py stock --model qwen3-next-48 --memory 0.95 --compiled --streams 128,256,32,8,1 --tokens 480"
  ["hybrid-compiled-auto"]="width.py auto --model qwen3-next-48 --memory 0.95 --compiled --streams 128,256,32,8,1 --tokens 480"
  ["hybrid-repeats-stock"]="width.py stock --model qwen3-next-48 --memory 0.95 --compiled --slots 256 --streams 1,256 --regimes structured,alternating --tokens 480 --repeats 32"
  ["hybrid-repeats-auto"]="width.py auto --model qwen3-next-48 --memory 0.95 --compiled --slots 256 --streams 1,256 --regimes structured,alternating --tokens 480 --repeats 32"
  ["hybrid-plain-auto"]="width.py auto --widths 0,1,3,5,7 --model qwen3-next-48 --memory 0.95 --compiled --streams 128,256,192 --tokens 480"
  # what draft-graphs is worth
  ["dense-small-static3"]="width.py static3 --slots 256 --streams 1,8,32 --repeats 3 --regimes structured,prose"
  ["dense-small-plain3"]="width.py plain3 --slots 256 --streams 1,8,32 --repeats 3 --regimes structured,prose"
  ["dense-one-process-static3"]="width.py static3 --one-process --slots 32 --streams 1,8,32 --tokens 640 --repeats 3 --regimes structured,prose"
  ["dense-one-process-plain3"]="width.py plain3 --one-process --slots 32 --streams 1,8,32 --tokens 640 --repeats 3 --regimes structured,prose"
  ["dense-compiled-static3"]="width.py static3 --compiled --slots 32 --streams 1,8,32 --tokens 480 --regimes structured,prose"
  ["dense-compiled-plain3"]="width.py plain3 --compiled --slots 32 --streams 1,8,32 --tokens 480 --regimes structured,prose"
  # what gdn-active-width is worth
  ["gdn-kernels"]="gdn_kernels.py"
  ["hybrid-rows-narrowed"]="width.py static3 --model qwen3-next-48 --memory 0.94 --streams 1,8,32,128 --tokens 640 --regimes prose"
  ["hybrid-rows-stock"]="width.py static3 --model qwen3-next-48 --memory 0.94 --streams 1,8,32,128 --tokens 640 --regimes prose"
  # two GPUs: same widths and tokens on both, and a rank that is killed
  ["two-gpus"]="tp2.py --model qwen3-8b --steps 10000 --seconds 200"
  # further shapes, texts and arms
  ["moe-stock"]="width.py stock --model qwen3-30b-a3b --streams 128,32,8,1 --repeats 5"
  ["moe-auto"]="width.py auto --model qwen3-30b-a3b --streams 128,32,8,1 --repeats 5"
  ["moe-static7"]="width.py static7 --model qwen3-30b-a3b --streams 128,32,8,1 --repeats 5"
  ["dense-other-stock"]="width.py stock --streams 128,32 --regimes code,hard"
  ["dense-other-auto"]="width.py auto --streams 128,32 --regimes code,hard"
  ["dense-off"]="width.py off --streams 1,8,32,128,256 --regimes prose"
  ["dense-adaptive"]="width.py adaptive --slots 256 --streams 1,8,32,128"
  ["sampler"]="sampler.py"
)
# A trained pair and the engines on it: pair-SEED, then pair-SEED-ENGINE.
PAIR="--hidden 512 --layers 8 --head-dim 64 --batch 64 --length 512 --steps 1500 --draft-steps 1500 --anchors 16 --rate 1e-3"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if (($# < 3)); then
  echo "usage: $0 OUT SECONDS NAME...; names: ${!QUESTIONS[*]} pair-SEED pair-SEED-ENGINE" >&2
  exit 2
fi
out=$1
end=$(($(date +%s) + $2))
shift 2
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"

for name in "$@"; do
  left=$((end - $(date +%s)))
  if ((left < 20)); then
    echo "$name: no time left"
    continue
  fi
  if [[ $name =~ ^pair-([0-9]+)$ ]]; then
    command="$here/../block/train.py --device cuda --seed ${BASH_REMATCH[1]} $PAIR --out $out/$name"
  elif [[ $name =~ ^(pair-[0-9]+)-(.+)$ ]]; then
    command="$here/trained_pair.py ${BASH_REMATCH[2]} --pair $out/${BASH_REMATCH[1]} --tokens 600 --out $out/$name.json"
  elif [[ -n ${QUESTIONS[$name]:-} ]]; then
    command="$here/${QUESTIONS[$name]} --out $out/$name.json"
  else
    echo "$name: unknown; known are ${!QUESTIONS[*]} pair-SEED pair-SEED-ENGINE" >&2
    exit 2
  fi
  export BENCH_STOCK_ROWS=0
  [[ $name == hybrid-rows-stock ]] && BENCH_STOCK_ROWS=1
  # shellcheck disable=SC2086 # words
  timeout -k 5 "$left" python $command >"$out/$name.log" 2>&1
  echo "$name: exit code $?, $((end - $(date +%s))) s left"
  grep -E "^[0-9]+ |^\{|started in|drafter graphs|Error" "$out/$name.log" | cut -c1-300 | tail -20
done
