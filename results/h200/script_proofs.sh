#!/bin/sh
# What a proof finds in each of three loops from a plain start (bf16 autocast, compiled): one GPU, ten minutes a loop at most.
# sh results/h200/script_proofs.sh FOLDER [MINUTES] [OPTION OF THE LOOPS...]; needs transformers, accelerate and lightning.
# `--plain` after the minutes leaves everything at its default, `--plant slow_loader` proves a planted slowdown. A loop that was cut off goes on with the same call.
folder=$1
minutes=${2:-9}
shift
[ $# -gt 0 ] && shift
mkdir -p "$folder"
for loop in nano hugging_face lightning_loop; do
    [ -s "$folder/$loop.jsonl" ] || trainstep run --quiet --no-page --out "$folder/$loop.jsonl" \
        "tests/planted/loops/$loop.py" --device cuda --compile --steps 200 "$@"
    trainstep explain "$folder/$loop.jsonl" --prove --processes 5 --script-steps 60 --budget-minutes "$minutes" \
        --out "$folder/${loop}_proof.jsonl" --json > "$folder/${loop}_proof.json"
done
