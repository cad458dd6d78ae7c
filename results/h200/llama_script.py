"""A training script of a Llama of Transformers, by an author who chooses nothing: `trainstep run llama_script.py --steps 200`.

221 million parameters, 16 sequences of 1,024 tokens, bf16 autocast, torch's AdamW, and torch.compile only with `--compile`.
results/h200/script_llama.jsonl and script_llama_proof.ndjson are `trainstep run` and `explain --prove` of it.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--compile", action="store_true")
asked = parser.parse_args()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32_768,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=12,
    num_attention_heads=16,
    max_position_embeddings=1024,
    use_cache=False,
)
model = LlamaForCausalLM(config).to("cuda")
if asked.compile:
    model.compile()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
tokens = torch.randint(0, config.vocab_size, (64, 16, 1024))
for step in range(asked.steps):
    batch = tokens[step % len(tokens)].to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
