"""fp32 attention by products of fp16 parts that are split beforehand, in plain Triton."""
