"""The training program on Megatron."""
