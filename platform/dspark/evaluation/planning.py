"""What is to be measured: which drafter on which target, which prompts in which mode, and what of it is done."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.chat import ChatConfig
from dspark.config import build_config
from dspark.data.decoding import derive_seed
from dspark.data.prompts import Prompt, PromptSet
from dspark.engine.drafter_folder import (
    CALIBRATION,
    COST_CURVE,
    DRAFTER_FILES,
    WITHOUT_FOLDER,
    check_drafter,
    drafter_sha256,
    drafter_target,
)
from dspark.errors import MissingInput
from dspark.evaluation.config import EvaluateConfig, EvaluationMode
from dspark.provenance import file_sha256, fingerprint
from dspark.storage import Location, absolute, locate
from dspark.targets import TargetConfig
from dspark.transfer import local_folder


@dataclass(frozen=True)
class Subject:
    """The drafter under test, the target it drafts for, and how both are talked to."""

    drafter: str
    target: TargetConfig
    identity: dict[str, Any]
    chat: ChatConfig
    drafter_sha256: str


@dataclass(frozen=True)
class WorkItem:
    """One prompt in one mode. request: fingerprint of all that its result depends on, beside the prompt."""

    prompt: Prompt
    mode: EvaluationMode
    request: str
    compare: bool
    time_plain: bool

    def is_answered_by(self, row: Mapping[str, Any]) -> bool:
        """Whether an earlier result row is what this item would give, with all the extras asked for."""
        if (row["id"], row["mode"], row["request"]) != (self.prompt.id, self.mode.name, self.request):
            return False
        if row["prompt"] != fingerprint(self.prompt.messages) or row["domain"] != self.prompt.domain:
            return False
        has_comparison = all(turn["comparison"] is not None for turn in row["turns"])
        has_plain = all(turn["plain"] is not None for turn in row["turns"])
        return (has_comparison or not self.compare) and (has_plain or not self.time_plain)

    def seed(self, seed: int, turn: int) -> int:
        """Of the random numbers of one turn, whatever is decoded beside or before it. seed: the stage's."""
        return derive_seed(seed, f"{self.mode.name}\0{self.prompt.id}", turn)

    def row(self, turns: Sequence[Mapping[str, Any]], error: str | None) -> dict[str, Any]:
        """The item's result as stored. error: why the conversation could not be had to its end."""
        return {
            "id": self.prompt.id,
            "domain": self.prompt.domain,
            "prompt": fingerprint(self.prompt.messages),
            "mode": self.mode.name,
            "request": self.request,
            "error": error,
            "turns": list(turns),
        }


def open_subject(config: EvaluateConfig) -> Subject:
    """Raises: MissingInput without a complete drafter folder, or without the cost curve that scheduled lengths need;
    Mismatch if it was trained for another target.
    """
    if config.drafter in WITHOUT_FOLDER:
        raise MissingInput(
            f"drafter {config.drafter!r} has no folder, which evaluation needs; jobs/benchmark.py and jobs/compare.py "
            "take it"
        )
    folder = local_folder(config.drafter, (*DRAFTER_FILES, CALIBRATION, COST_CURVE))
    target = config.target or drafter_target(str(folder))
    provenance = check_drafter(str(folder), target)
    if config.lengths == "scheduled" and not (folder / COST_CURVE).is_file():
        raise MissingInput(
            f"lengths 'scheduled' needs {folder / COST_CURVE}; make it with jobs/profile_engine.py, or set lengths to "
            "'fixed'"
        )
    chat = build_config(ChatConfig, provenance["chat"], source=f"{folder}/provenance.json")
    return Subject(absolute(config.drafter), target, provenance["target"], chat, drafter_sha256(folder))


def request_of(config: EvaluateConfig, subject: Subject, mode: EvaluationMode) -> str:
    """Fingerprint of what decides a rollout: a result row is used again only under the same one."""
    content: dict[str, Any] = {
        "drafter": subject.drafter_sha256,
        "target": subject.identity,
        "dtype": subject.target.dtype,
        "chat": subject.chat.model_dump(),
        "mode": mode.identity(),
        "max_new_tokens": config.max_new_tokens,
        "through": config.through,
        "lengths": config.lengths,
        "verify_length": config.verify_length,
        "seed": config.seed,
    }
    if config.through == "engine":
        content["engine"] = config.engine.model_dump()  # what does not fit into it is a row with an error
    if config.through == "engine" and config.engine.lookup is not None:  # what copies taught it, all rows together
        content |= {"concurrency": config.concurrency, "num_workers": config.num_workers}
    if config.lengths == "scheduled":
        load = {"concurrency": config.concurrency, "num_workers": config.num_workers}
        content |= load | {name: _digest(locate(subject.drafter) / name) for name in (CALIBRATION, COST_CURVE)}
    return fingerprint(content)


def select_prompts(prompts: PromptSet, config: EvaluateConfig) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts to measure, and rows left out by reason: rows read = selected + left out.

    Raises: ValueError when no row is held out.
    """
    heldout = [prompt for prompt in prompts.prompts if prompt.split == "heldout"]
    if not heldout:
        raise ValueError(
            f"none of {len(prompts.prompts)} prompts is held out; give heldout prompts, set prompts[].split to heldout "
            "or raise heldout_fraction"
        )
    selected = heldout
    if config.prompts_per_domain is not None:
        chosen = set()
        for group in _by_domain(heldout).values():
            ranked = sorted(group, key=lambda prompt: fingerprint([config.seed, prompt.id]))
            chosen |= {prompt.id for prompt in ranked[: config.prompts_per_domain]}
        selected = [prompt for prompt in heldout if prompt.id in chosen]
    left_out = prompts.rejected_by_reason | {
        "over limit": prompts.num_over_limit,
        "train split": len(prompts.prompts) - len(heldout),
        "over prompts_per_domain": len(heldout) - len(selected),
    }
    return selected, {reason: count for reason, count in left_out.items() if count}


def plan_work(config: EvaluateConfig, subject: Subject, prompts: Sequence[Prompt]) -> list[WorkItem]:
    """Every prompt in every mode; plain timing and comparison go to the first prompts of each domain."""
    ranks = {
        prompt.id: (rank, number)
        for number, group in enumerate(_by_domain(prompts).values())
        for rank, prompt in enumerate(group)
    }
    compared = set(sorted(ranks, key=lambda prompt_id: ranks[prompt_id])[: config.compare_with_generate])
    requests = {mode.name: request_of(config, subject, mode) for mode in config.modes}
    return [
        WorkItem(
            prompt=prompt,
            mode=mode,
            request=requests[mode.name],
            compare=mode.temperature == 0 and prompt.id in compared,
            time_plain=ranks[prompt.id][0] < config.time_plain,
        )
        for mode in config.modes
        for prompt in prompts
    ]


def split_done(items: Iterable[WorkItem], rows: Iterable[Mapping[str, Any]]) -> tuple[list[Any], list[WorkItem]]:
    """(rows that answer an item, one each; items still to do). Rows that answer none are results of something else."""
    latest = {(row["id"], row["mode"], row["request"]): row for row in rows}
    done, to_do = [], []
    for item in items:
        row = latest.get((item.prompt.id, item.mode.name, item.request))
        if row is not None and item.is_answered_by(row):
            done.append(row)
        else:
            to_do.append(item)
    return done, to_do


def _digest(path: Location) -> str | None:
    return file_sha256(path) if path.is_file() else None


def _by_domain(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.domain, []).append(prompt)
    return groups
