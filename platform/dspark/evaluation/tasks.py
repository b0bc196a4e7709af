"""The nine benchmarks of the DSpark paper by name: what domain each belongs to, and where its prompts come from.

A file is `<name>.jsonl` with rows `{"turns": [str, …]}`. Another set that is to stand in for one of the nine is called
`<name>-standin.jsonl`, and its figures carry that name.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.data.prompts import PromptSource
from dspark.errors import MissingInput
from dspark.provenance import write_bytes

FOLDER_VARIABLE = "DSPARK_BENCHMARKS"
STAND_IN = "-standin"
BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
TESTED = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


@dataclass(frozen=True)
class Benchmark:
    """hub, config, split, files: the data set on the hub; files, where given, are read as JSON lines.

    columns: the first holds the prompt or all turns of one; a second one is added as input where it is not empty. form:
    what the prompt is put into. num_prompts: as many as the paper's code takes.
    """

    domain: str
    num_prompts: int
    hub: str
    columns: tuple[str, ...]
    split: str = "test"
    config: str | None = None
    files: str | None = None
    form: str = "{}"

    def turns(self, row: Mapping[str, Any]) -> list[str]:
        """The user's turns in a row of the data set. Raises: ValueError naming a column that is not there."""
        for column in self.columns:
            if column not in row:
                raise ValueError(f"{self.hub} has no column {column!r}, but {', '.join(row)}; its form has changed")
        first, *more = (row[column] for column in self.columns)
        texts = [first] if isinstance(first, str) else list(first)
        texts[0] = "\n\nInput:\n".join([texts[0], *(text for text in more if text)])
        return [self.form.format(texts[0]), *texts[1:]]


BENCHMARKS = {
    "gsm8k": Benchmark("math", 500, "openai/gsm8k", ("question",), config="main", form=BOXED),
    "math500": Benchmark("math", 500, "HuggingFaceH4/MATH-500", ("problem",), form=BOXED),
    "aime25": Benchmark("math", 30, "MathArena/aime_2025", ("problem",), split="train", form=BOXED),
    "humaneval": Benchmark("code", 164, "openai/openai_humaneval", ("prompt",), form=TESTED),
    "mbpp": Benchmark("code", 256, "google-research-datasets/mbpp", ("prompt",), config="sanitized"),
    "livecodebench": Benchmark(
        "code",
        500,
        "livecodebench/code_generation_lite",
        ("question_content",),
        split="train",
        files="test*.jsonl",
        form="Write a correct Python program for this problem.\n\n### Question:\n{}\n\n### Answer:",
    ),
    "mt-bench": Benchmark("chat", 80, "HuggingFaceH4/mt_bench_prompts", ("prompt",), split="train"),
    "alpaca": Benchmark("chat", 500, "tatsu-lab/alpaca", ("instruction", "input"), split="train"),
    "arena-hard-v2": Benchmark(
        "chat",
        500,
        "lmarena-ai/arena-hard-auto",
        ("prompt",),
        split="train",
        files="data/arena-hard-v2.0/question.jsonl",
    ),
}


def task_source(name: str, path: str, *, limit: int | None = None) -> PromptSource:
    """The benchmark's prompts: a JSONL file of `{"turns": [str, …]}`, all of it held out, in domain "math/gsm8k" etc.

    Raises: ValueError for a name that is none of the nine.
    """
    require_known([name])
    stem = Path(path).name.partition(".")[0]
    label = f"{name}{STAND_IN}" if stem == f"{name}{STAND_IN}" else name
    return PromptSource(path=path, split="heldout", domain=f"{BENCHMARKS[name].domain}/{label}", limit=limit)


def require_known(names: Iterable[str]) -> None:
    """Raises: ValueError for a name that is none of the nine."""
    for name in names:
        if name not in BENCHMARKS:
            raise ValueError(
                f"no benchmark is called {name!r}; known: {', '.join(BENCHMARKS)}; other prompts go under `prompts`"
            )


def benchmark_folder(folder: str | None) -> Path | None:
    """Where the files are: `folder`, or what the environment variable DSPARK_BENCHMARKS names; None without either."""
    named = folder or os.environ.get(FOLDER_VARIABLE)
    return Path(named).expanduser() if named else None


def benchmark_sources(names: Sequence[str], folder: str | None, *, from_hub: bool = False) -> list[PromptSource]:
    """Each benchmark's file in the folder, as many of its prompts as the paper takes.

    from_hub: what the folder lacks is fetched into it. Raises: MissingInput for what is not there.
    """
    place = benchmark_folder(folder)
    if place is None:
        raise MissingInput(
            f"benchmarks are files of a folder, and none is named; set benchmarks_folder, or {FOLDER_VARIABLE} in the "
            "environment"
        )
    return [task_source(name, str(_file(name, place, from_hub)), limit=BENCHMARKS[name].num_prompts) for name in names]


def fetch_benchmark(name: str, folder: Path) -> Path:
    """`folder/<name>.jsonl` made from the hub's data set; whole or not at all."""
    from datasets import load_dataset  # heavy, and not needed for files

    benchmark = BENCHMARKS[name]
    files = {} if benchmark.files is None else {"data_files": benchmark.files}
    rows = load_dataset(benchmark.hub, benchmark.config, split=benchmark.split, **files)
    path = folder / f"{name}.jsonl"
    lines = (json.dumps({"turns": benchmark.turns(row)}, ensure_ascii=False) for row in rows)
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode())
    return path


def _file(name: str, folder: Path, from_hub: bool) -> Path:
    for path in (folder / f"{name}.jsonl", folder / f"{name}{STAND_IN}.jsonl"):
        if path.is_file():
            return path
    if from_hub:
        return fetch_benchmark(name, folder)
    raise MissingInput(
        f"{folder} has no {name}.jsonl (nor {name}{STAND_IN}.jsonl); put it there, rows of turns, or set "
        "benchmarks_from_hub true"
    )
