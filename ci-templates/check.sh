#!/usr/bin/env bash
# One diagnosis, written in every format a CI system reads; ends with the exit code of the diagnosis. Settings are variables, so that
# nothing typed in a workflow is ever read as shell.
set -uo pipefail

xpufp8="${XPUFP8:-xpufp8}"
folder="${XPUFP8_CI_OUTPUT:-xpufp8-report}"
mkdir -p "$folder"

options=(--device "${XPUFP8_CI_DEVICE:-sim:arc-pro-b60}" --python "${XPUFP8_CI_PYTHON:-python}")
[ -n "${XPUFP8_CI_POLICY:-}" ] && options+=(--policy "$XPUFP8_CI_POLICY")
[ -n "${XPUFP8_CI_BASELINE:-}" ] && options+=(--baseline "$XPUFP8_CI_BASELINE")
[ -n "${XPUFP8_CI_FAIL_ON:-}" ] && options+=(--fail-on "$XPUFP8_CI_FAIL_ON")
[ -n "${XPUFP8_CI_MODEL:-}" ] && options+=("$XPUFP8_CI_MODEL")
while IFS= read -r word; do
  options+=("$word")
done < <(python3 -c 'import os, shlex; print(*shlex.split(os.environ.get("XPUFP8_CI_ARGS", "")), sep="\n", end="")' && echo)
[ -z "${options[-1]}" ] && unset 'options[-1]'

code=0
"$xpufp8" doctor "${options[@]}" --format json --output "$folder/report.json" || code=$?
verdict=unknown
if [ -f "$folder/report.json" ]; then
  verdict=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["verdict"])' "$folder/report.json")
  # Each ends with the diagnosis's own exit code, which is known already.
  for format in sarif junit html markdown; do
    case $format in junit) end=junit.xml ;; markdown) end=md ;; *) end=$format ;; esac
    "$xpufp8" render "$folder/report.json" --format "$format" --output "$folder/report.$end" || [ $? -eq "$code" ] || exit 2
  done
  if [ -n "${GITHUB_ACTIONS:-}" ]; then
    "$xpufp8" render "$folder/report.json" --format github
  else
    "$xpufp8" render "$folder/report.json"
  fi
fi
if [ -n "${GITHUB_OUTPUT:-}" ]; then
  {
    echo "verdict=$verdict"
    echo "exit-code=$code"
    echo "sarif=$folder/report.sarif"
    echo "report=$folder"
  } >> "$GITHUB_OUTPUT"
fi
exit "$code"
