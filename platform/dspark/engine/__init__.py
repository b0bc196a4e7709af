"""What turns target logits into committed tokens."""
