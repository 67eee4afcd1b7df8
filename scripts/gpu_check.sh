#!/usr/bin/env bash
# Check the GPUs that are there against what is counted and promised, in a few minutes and with nothing to install.
#
#   scripts/gpu_check.sh [FOLDER] [options of scripts/gpu_check.py]
#
# One GPU stands for each rank of four in turn. With four GPUs the published profile is taken as it is, too, if pandas and
# pyarrow are there. Figures go to FOLDER (default: a fresh one under runs/). PYTHON: the Python that has torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:-runs/$(date -u +%Y%m%dT%H%M%S)-gpu-check}
python=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" KINETO_LOG_LEVEL=99

if ! "$python" -c 'import torch'; then
    echo "error: $python has no torch; PYTHON=... names one that has" >&2
    exit 2
fi
code=0
"$python" scripts/gpu_check.py --out "$folder/check" "${@:2}" || code=$?
[ $code -ne 2 ] || exit 2 # a mistake in the request

if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -lt 4 ]; then
    echo "the published profile as it is: n/a, it needs four GPUs"
elif ! "$python" -c 'import pandas, pyarrow' 2>/dev/null; then
    echo "the published profile as it is: n/a, it needs pandas and pyarrow"
else
    "$python" scripts/profile_step.py --workload kimi-debug --ranks 4 --ep 2 --variant baseline --variant batched \
        --device cuda --out "$folder/profile" || code=$?
fi
exit $code
