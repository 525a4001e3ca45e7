#!/usr/bin/env bash
# Writes the lock files anew from locks/*.in. Run by hand (`make lock`), with network; needs pip-tools, which it puts
# into a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/pip" install --quiet pip-tools
compile() {
  "$tools/bin/pip-compile" --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-header --no-annotate \
    --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options "$@"
}
cd locks
compile -o test.txt router.in worker.in torch-needs.in test.in
compile -o worker.txt -c test.txt router.in worker.in torch-needs.in
compile -o router.txt -c test.txt router.in
compile -o clients.txt clients.in
compile -o gateway.txt gateway.in
compile -o guidellm.txt guidellm.in
# torch comes without CUDA (setup/install.py), so what the CUDA build asks for goes
awk '/^[A-Za-z0-9]/ { kept = $0 !~ /^(torch|triton|nvidia-|cuda-)/ } kept' guidellm.txt > guidellm.lock
mv guidellm.lock guidellm.txt
compile -o fuzz.txt -c test.txt fuzz.in
