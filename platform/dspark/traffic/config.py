"""The sections `traffic` and `watch` of a deployment's args: what is recorded of served answers, what is watched."""

import re
import string
from typing import Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from dspark.config import Config

RuleName = Literal["secret", "email", "key", "card", "iban", "phone", "address"]
PLACEHOLDERS = ("drafter", "traffic", "id")


class TextsConfig(Config):
    """What is kept of prompts and answers, after redaction. Nothing of them unless one of the two is asked for."""

    prompts: bool = False
    """Keep prompts, in a form that jobs/generate.py reads."""
    answers: bool = False
    """Keep answers."""
    share: float = Field(1.0, gt=0, le=1)
    """Of the recorded requests, those whose texts are kept."""
    rules: list[RuleName] = list(get_args(RuleName))
    """Built-in rules to apply; each match becomes the rule's name in brackets. No rule knows everything: who must not
    keep personal data keeps no texts."""
    redact: dict[str, str] = {}
    """Further rules, by name a regular expression of Python's `re`. A slow one slows the server."""
    max_characters: int = Field(20_000, ge=1)
    """Of a text, what is kept of its beginning."""

    @field_validator("redact")
    @classmethod
    def _check_patterns(cls, rules: dict[str, str]) -> dict[str, str]:
        for name, pattern in rules.items():
            try:
                is_empty = re.compile(pattern).match("") is not None
            except re.error as error:
                raise ValueError(f"{name!r} is no regular expression: {error}") from None
            if is_empty:
                raise ValueError(f"{name!r} ({pattern!r}) also fits nothing at all; make it fit one character or more")
        return rules

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.prompts and not self.answers:
            raise ValueError("texts keeps neither prompts nor answers; set one of them, or leave texts out")
        return self


class TrafficConfig(Config):
    """Recording of served rounds: raw confidences beside what was accepted, for jobs/calibrate.py --from-traffic."""

    folder: str
    """A path or a URI, shared by the replicas; gets `rounds-….parquet`, and `texts-….jsonl` where texts are kept."""
    share: float = Field(1.0, gt=0, le=1)
    """Of the requests, those that are recorded."""
    whole_blocks: float = Field(0.0, ge=0, le=1)
    """Of the recorded requests, those that have every block verified whole: slower, and it shows how slots fare that
    the scheduler would not have verified. Some hundredths do where deep slots have few rounds."""
    max_bytes: int = Field(1_000_000_000, ge=100_000)
    """Of the folder; the oldest files make room for new ones."""
    shard_rounds: int = Field(20_000, ge=1)
    """Rounds after which a file is written; a round is some 40 bytes there."""
    flush_s: float = Field(60.0, gt=0)
    """Seconds after which it is written anyway: what a crash loses."""
    max_waiting: int = Field(1_000, ge=1)
    """Answers that may wait for the writer; what comes while it is further behind is dropped and counted."""
    texts: TextsConfig | None = None
    """None keeps no text at all."""


class FineTuneConfig(Config):
    """A job to start when acceptance has fallen. Its drafter is served once somebody names it; see docs."""

    command: list[str] = Field(min_length=1)
    """Submitted to Ray's job API, a part each. {drafter} stands for the served drafter's folder, {traffic} for the
    folder of recorded rounds, {id} for the job's id, which names an output of its own."""
    address: str | None = None
    """Of the job API, `http://host:8265`; None takes the cluster that serves."""
    working_dir: str | None = None
    """Folder of the job; None takes what the cluster's nodes have as theirs."""
    cooldown_s: float = Field(86_400.0, gt=0)
    """Seconds after a start in which there is no other."""

    @field_validator("command")
    @classmethod
    def _check_placeholders(cls, command: list[str]) -> list[str]:
        for part in command:
            try:
                names = [name for _, name, _, _ in string.Formatter().parse(part) if name is not None]
            except ValueError as error:
                raise ValueError(f"{part!r}: {error}; write {{{{ and }}}} for braces") from None
            unknown = [name for name in names if name not in PLACEHOLDERS]
            if unknown:
                raise ValueError(f"{part!r} holds {{{unknown[0]}}}; there are {', '.join(PLACEHOLDERS)}")
        return command


class WatchConfig(Config):
    """What is watched of a drafter with a confidence head while it serves."""

    window_rounds: int = Field(10_000, ge=200)
    """Newest rounds of each way of decoding over which calibration error is measured."""
    calibration_check_s: float | None = Field(10.0, gt=0)
    """Seconds between two looks at the drafter's calibration.json: what is new there is taken over while it serves.
    None looks at the start only."""
    drop: float = Field(0.1, gt=0, lt=1)
    """Share by which acceptance must have fallen for an alarm to be due."""
    rounds_between_false_alarms: float = Field(1e6, gt=1)
    """Mean number of rounds, at least, until an alarm comes where nothing has changed."""
    design_effect: float = Field(4.0, ge=1)
    """Rounds of one answer resemble each other: so many count as one."""
    learn_rounds: int = Field(2_000, ge=200)
    """First rounds that make up the level where calibration.json tells none."""
    fine_tune: FineTuneConfig | None = None
    """None starts nothing."""
