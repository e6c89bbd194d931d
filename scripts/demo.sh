#!/bin/sh
# `make demo`: the doctor on a tiny block-FP8 Llama (config.json only), with the real vLLM of this environment on the CPU.
set -u
say() { printf '\n=== %s\n\n' "$1"; }

say "1. As vLLM comes: xpufp8 doctor $TINY --device cpu --no-runtime-fixes"
"$BIN/xpufp8" doctor "$TINY" --device cpu --no-runtime-fixes
stock=$?
case $stock in
0) echo "exit code 0: this CPU has AMX, so vLLM's own kernels cover block FP8." ;;
1) echo "exit code 1: vLLM refuses this model on this CPU, and no weight had to be loaded to know it." ;;
*) echo "exit code $stock: the doctor did not finish" && exit "$stock" ;;
esac
