#!/bin/sh
# Entrypoint of a vLLM container: the image's own `vllm serve` with xpufp8 before it.
#
#   docker run --device /dev/dri -v /dev/dri/by-path:/dev/dri/by-path --group-add "$(getent group render | cut -d: -f3)" \
#     --shm-size 16g -v xpufp8-cache:/var/cache/xpufp8 IMAGE MODEL --tensor-parallel-size 2
#
# Arguments are MODEL and options of vllm serve, passed on unchanged. exec twice over: signals of the container reach vLLM.
set -eu
export XPUFP8_CACHE_DIR="${XPUFP8_CACHE_DIR:-/var/cache/xpufp8}"
exec xpufp8 serve "$@"
