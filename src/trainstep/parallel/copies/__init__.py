"""Messages between ranks of one machine as copies into each other's memory, in place of collectives of NCCL or gloo."""
