"""The nine benchmarks of the DSpark paper by name: what domain each belongs to, and how its file is read."""

from dspark.data.prompts import PromptSource

DOMAINS = {
    "math": ("gsm8k", "math500", "aime25"),
    "code": ("humaneval", "mbpp", "livecodebench"),
    "chat": ("mt-bench", "alpaca", "arena-hard-v2"),
}


def task_source(name: str, path: str, *, limit: int | None = None) -> PromptSource:
    """The benchmark's prompts: a JSONL file of `{"turns": [str, …]}`, all of it held out, in domain "math/gsm8k" etc.

    Raises: ValueError for a name that is none of the nine.
    """
    for domain, names in DOMAINS.items():
        if name in names:
            return PromptSource(path=path, split="heldout", domain=f"{domain}/{name}", limit=limit)
    known = ", ".join(task for names in DOMAINS.values() for task in names)
    raise ValueError(f"no benchmark is called {name!r}; known: {known}; other prompts go under `prompts`")
