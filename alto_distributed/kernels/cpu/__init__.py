"""The update on CPUs: C, compiled with the machine's own compiler."""
