#!/bin/sh
# Each parallel strategy in its fastest captured form, interleaved with `none`, whose ranks send nothing: two GPUs, xl at 512 tokens.
# ./captured_messages.sh FILE [OPTION...]; about 30 s a pair. `--model medium --context 256` measures the small end.
file=$1
shift
pair() {
    trainstep parallel --ranks 2 --device cuda --attention trainstep --adamw trainstep --compile block --capture step \
        --warmups 5 --steps 20 --processes 1 --out "$file" "$@"
}
set -- --model xl --context 512 "$@"
pair "$@" --precision bf16_autocast --sync none,sharded_flat --transport copies
pair "$@" --precision bf16_autocast --sync none,bucketed --update by_bucket --in-place --transport copies
pair "$@" --precision bf16_autocast --sync none,fsdp --transport copies
pair "$@" --precision bf16_autocast --sync none,fsdp --compute-dtype bf16 --transport copies
pair "$@" --precision bf16_master --sync none,sharded_flat --transport copies
pair "$@" --precision bf16_master --sync none,bucketed --update by_bucket --in-place --transport copies
pair "$@" --precision bf16_autocast --sync none,bucketed --update by_bucket --in-place
