#!/usr/bin/env bash
# All benchmarks of the training part on one CUDA GPU, with random weights at real sizes, in under 8 minutes:
#
#     bash benchmarks/gpu.sh                    # a card of 140 GB: step.py's four sides hold their memory side by side
#     SIZE=qwen2.5-0.5b bash benchmarks/gpu.sh  # a smaller card
#     bash benchmarks/gpu.sh --small            # its logic, at sizes that a CPU does in two minutes
#
# Prints Markdown for benchmarks/README.md. Nothing is fetched; TRL and Liger take part if they are installed. Each part has a
# time limit of its own, and one that fails or runs out says so and does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
loss="--tokens 2048 --vocabulary 151936 --hidden 1536 --dtype bfloat16 --rounds 2"
step=(--random "${SIZE:-qwen2.5-1.5b}" --batch-size 32 --micro-batch 8 --new-tokens 256 --gradient-checkpointing --rounds 2)
step+=(--sides grasp.py "grasp.py, 8-bit AdamW" TRL "TRL, micro-batches") # six would not fit
memory=""
if [ "${1:-}" = --small ]; then
    loss="--tokens 64 --vocabulary 2000 --hidden 32 --rounds 1"
    step=(--random tiny --batch-size 4 --micro-batch 2 --new-tokens 8 --rounds 1 --peak-tflops 0.1)
    memory="--only real"
elif ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device here; --small tries the script itself" >&2
    exit 2
fi
failed=0
part() {  # part SECONDS SCRIPT [ARGUMENT ...]
    local limit=$1
    shift
    printf '\n## `python %s`\n\n' "$*"
    timeout "$limit" "$python" "$@" || { printf '\nnot measured: exit status %s\n' $?; failed=1; }
}
# shellcheck disable=SC2086  # the settings are words
{
    part 120 benchmarks/loss.py $loss
    part 200 benchmarks/step.py "${step[@]}"
    part 150 benchmarks/memory.py $memory
}
exit $failed
