#!/usr/bin/env bash
# Usage: tools/try_wheel.sh WHEEL [PYTHON]
# Installs a wheel into a new environment, away from the sources, and has it serve the demo model.
set -euo pipefail
wheel=$(realpath "$1")
constraints=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../constraints.txt")
folder=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || true; rm -rf "$folder"' EXIT
"${2:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --disable-pip-version-check --quiet -c "$constraints" "$wheel"
cd "$folder"
venv/bin/strandline serve --port 0 > log 2>&1 &
server=$!
for _ in $(seq 300); do
  address=$(sed -n 's/^serving demo on //p' log)
  [ -z "$address" ] || break
  kill -0 "$server" || { cat log; exit 1; }
  sleep 1
done
body='{"messages": [{"role": "user", "content": "Hello! My name is Ada."}], "max_tokens": 8}'
curl --fail --silent --show-error "$address/v1/chat/completions" -H 'Content-Type: application/json' -d "$body"
echo
kill -TERM "$server"
wait "$server"
tail -n 1 log
