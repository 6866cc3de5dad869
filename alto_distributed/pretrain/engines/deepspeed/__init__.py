"""The training program on DeepSpeed."""
