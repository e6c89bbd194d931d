#!/bin/sh
# Debian packages that some tests need: a C and C++ compiler, the Level Zero loader (without any GPU driver), headless Chromium.
# Tests that need one which is not there skip and say so.
set -u
PACKAGES="gcc g++ libze1 libze-dev util-linux chromium chromium-driver"
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not root, or no apt-get: install these by hand if you can: $PACKAGES"
    exit 0
fi
missing=""
for name in $PACKAGES; do
    dpkg -s "$name" >/dev/null 2>&1 || missing="$missing $name"
done
[ -z "$missing" ] && exit 0
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
