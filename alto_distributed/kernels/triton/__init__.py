"""The update on GPUs, in Triton. Start reading at :mod:`.step`."""
