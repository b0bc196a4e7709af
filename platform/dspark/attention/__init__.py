"""KV memory in pages, and attention over it; knows nothing of drafting."""
