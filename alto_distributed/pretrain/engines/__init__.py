"""What trains: DeepSpeed or Megatron, behind one interface."""
