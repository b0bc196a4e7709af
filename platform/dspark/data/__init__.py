"""Offline data: prompts, answers and the cache of hidden states."""
