#!/bin/sh
# `make demo`: the doctor on a tiny block-FP8 Llama (config.json only) with the real vLLM of this environment on the CPU, and on
# models of public failure reports (config.json only) for an Arc Pro B60 that is not here.
# The tiny model has no weights, so its commands say --load-format dummy: they can be copied and run as they stand.
set -u
MODELS=tests/data/models
say() { printf '\n=== %s\n\n' "$1"; }
doctor() {
    say "xpufp8 doctor $*"
    "$BIN/xpufp8" doctor "$@" 2>/dev/null
    code=$?
    printf 'exit code %s\n' "$code"
}

say "1. As vLLM comes, on this CPU"
doctor "$TINY" --load-format dummy --device cpu --no-runtime-fixes
case $code in
0) echo "This CPU has AMX, so vLLM's own kernels cover block FP8." ;;
1) echo "vLLM refuses this model on this CPU, and no weight had to be loaded to know it." ;;
*) echo "The doctor gave no verdict; run the command again to see what it prints on stderr." && exit "$code" ;;
esac

say "2. The same with xpufp8's repairs, proven by probing again"
doctor "$TINY" --load-format dummy --device cpu
[ "$code" -eq 0 ] || exit "$code"

say "3. Models of public reports, as they were run, on a simulated Arc Pro B60"
failed=0
doctor "$MODELS/Llama-3.1-8B-Instruct" --device sim:arc-pro-b60 --quantization fp8 --kv-cache-dtype fp8 --max-model-len 4096
[ "$code" -le 1 ] || failed=$code
doctor "$MODELS/Qwen3-VL-30B-A3B-Instruct" --device sim:arc-pro-b60 --quantization fp8 -tp 2 --max-model-len 32768
[ "$code" -le 1 ] || failed=$code
doctor "$MODELS/Qwen3.6-27B-FP8" --device sim:arc-pro-b60 -tp 2 --max-model-len 8192 --gpu-memory-utilization 0.90
[ "$code" -le 1 ] || failed=$code
doctor "$MODELS/OpenHermes-2.5-Mistral-7B" --device sim:arc-pro-b60 --quantization fp8
[ "$code" -le 1 ] || failed=$code
exit "$failed"
