"""Ray Train and DeepSpeed around a drafter."""
