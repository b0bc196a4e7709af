"""The demo prompts: what is committed is what the script builds, and the two splits are comparable and disjoint."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROMPTS = Path(__file__).resolve().parents[2] / "prompts"
SPLITS = ("train", "heldout")
SHARES = {"math": 0.4, "code": 0.4, "chat": 0.2}
ROWS = {"train": 1100, "heldout": 120}


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (PROMPTS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def texts(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"]]


def is_chinese(row: dict[str, Any]) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in "".join(texts(row)))


def test_building_again_gives_the_committed_bytes(tmp_path: Path) -> None:
    command = [sys.executable, str(PROMPTS / "build.py"), "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (PROMPTS / f"{split}.jsonl").read_bytes()


@pytest.mark.parametrize("split", SPLITS)
def test_rows_follow_the_schema(split: str) -> None:
    for row in read(split):
        assert list(row) == ["id", "domain", "template", "messages"]
        assert row["messages"]
        for message in row["messages"]:
            assert list(message) == ["role", "content"]
            assert message["role"] == "user"


@pytest.mark.parametrize("split", SPLITS)
def test_domains_have_their_shares(split: str) -> None:
    rows = read(split)
    counts = Counter(row["domain"] for row in rows)
    assert len(rows) == ROWS[split]
    assert counts.keys() == SHARES.keys()
    for domain, share in SHARES.items():
        assert counts[domain] / len(rows) == pytest.approx(share, abs=0.01)


def test_ids_are_unique_over_both_splits() -> None:
    ids = [row["id"] for split in SPLITS for row in read(split)]
    assert len(set(ids)) == len(ids)


def test_texts_are_unique_over_both_splits() -> None:
    prompts = [tuple(texts(row)) for split in SPLITS for row in read(split)]
    assert len(set(prompts)) == len(prompts)


def test_no_template_is_in_both_splits() -> None:
    train, heldout = ({row["template"] for row in read(split)} for split in SPLITS)
    assert not train & heldout


def test_every_heldout_kind_of_request_is_also_trained_on() -> None:
    train, heldout = ({row["id"].rsplit("-", 1)[0] for row in read(split)} for split in SPLITS)
    assert heldout <= train


@pytest.mark.parametrize("split", SPLITS)
def test_about_eight_percent_of_the_rows_are_chinese_in_all_domains(split: str) -> None:
    rows = read(split)
    chinese = [row for row in rows if is_chinese(row)]
    assert 0.06 < len(chinese) / len(rows) < 0.10
    assert {row["domain"] for row in chinese} == SHARES.keys()


@pytest.mark.parametrize("split", SPLITS)
def test_some_chat_rows_have_several_user_turns(split: str) -> None:
    turns = Counter((row["domain"], len(row["messages"]) > 1) for row in read(split))
    assert 0 < turns["chat", True] <= 0.1 * turns["chat", False]
    assert turns["math", True] == turns["code", True] == 0


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_are_neither_empty_nor_long(split: str) -> None:
    for row in read(split):
        for text in texts(row):
            assert text == text.strip()
            assert 8 <= len(text) <= 900, row["id"]


@pytest.mark.parametrize("split", SPLITS)
def test_no_slot_is_left_open_in_math_and_chat(split: str) -> None:
    for row in read(split):
        if row["domain"] != "code":
            assert not set("{}") & set("".join(texts(row))), row["id"]


@pytest.mark.parametrize("split", SPLITS)
def test_numbers_and_nouns_agree_with_their_articles(split: str) -> None:
    wrong = re.compile(r"\b[Aa] (8|11|18|8\d|8\d\d)\b|\b1 (hours|parts|minutes|days|tablets|bowls|people)\b")
    for row in read(split):
        assert not wrong.search("\n".join(texts(row))), row["id"]
