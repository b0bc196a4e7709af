"""The mathematics of one speculative cycle; torch only, no I/O."""
