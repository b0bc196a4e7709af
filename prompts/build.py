"""Rewrites train.jsonl and heldout.jsonl beside this file from templates/; the same bytes on every run.

Run: python prompts/build.py [--output FOLDER]
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # so that the import below also works when a test loads this file by its path

from templates import math_chance, math_money, math_people, math_rates, math_shapes, math_zh, words  # noqa: E402

SEED = 20261201
ROWS = {"train": {"math": 440, "code": 440, "chat": 220}, "heldout": {"math": 48, "code": 48, "chat": 24}}
DENOMINATORS = {"whole": 1, "tenths": 10, "cents": 100}
MAX_DRAWS = 2000
MATH_ENDINGS = {
    "en": ["", "", "", "", " Show your steps.", " Explain how you get the answer.", " Think it through step by step."],
    "zh": ["", "", "请列式计算。", "请写出计算步骤。"],
}


class Deck:
    """Hands out every item once, in random order, before any comes again."""

    def __init__(self, rng: random.Random, items: list[Any]) -> None:
        self._rng, self._items = rng, list(items)
        self._left: list[Any] = []

    def draw(self) -> Any:
        if not self._left:
            self._left = self._rng.sample(self._items, len(self._items))
        return self._left.pop()


def load_templates() -> list[dict[str, Any]]:
    """All templates, each with name, domain, family, language, heldout and texts."""
    found = []
    for module in (math_rates, math_money, math_people, math_shapes, math_chance, math_zh):
        found += [{**template, "domain": "math"} for template in module.TEMPLATES]
    for path in sorted((HERE / "templates").glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        domain = path.stem.split("_")[0]
        found += [{**template, "domain": domain} for template in content.get("templates", [])]
        found += [{**idea, "domain": domain} for idea in _ideas(content)]
    return [_completed(template) for template in found]


def _completed(template: dict[str, Any]) -> dict[str, Any]:
    name = template["name"]
    language = "zh" if name.startswith("zh-") else "en"
    family = name.removeprefix("zh-").split("-")[0]
    return {"heldout": False, "family": family, **template, "language": language}


def _ideas(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One template for each function idea: [call, what it does, a detail], asked for in the file's wordings."""
    for name, (call, does, detail) in content.get("ideas", {}).items():
        case = {"call": call, "does": does, "Does": does[0].upper() + does[1:], "detail": detail}
        yield {
            "name": name,
            "family": "python",
            "texts": content["wordings"],
            "cases": [case],
            "heldout": name in content.get("heldout_ideas", []),
        }


def display(value: Any) -> Any:
    """Numbers as a person writes them (1,250 or 2.50); everything else unchanged."""
    if isinstance(value, Fraction) and value.denominator == 1:
        value = int(value)
    return f"{value:,}" if isinstance(value, int) and value >= 1000 else value


def exact(value: Any) -> Any:
    """Numbers as fractions, so that no check rounds; everything else unchanged."""
    return Fraction(value) if isinstance(value, (int, Decimal)) else value


def is_clean(answer: Any, clean: str) -> bool:
    """Whether every number of the answer is positive and has no more decimals than `clean` allows."""
    numbers = answer if isinstance(answer, tuple) else (answer,)
    if any(number <= 0 for number in numbers):
        return False
    return clean == "fraction" or all(DENOMINATORS[clean] % Fraction(number).denominator == 0 for number in numbers)


def draw_values(template: dict[str, Any], decks: dict[str, Deck], rng: random.Random) -> dict[str, Any]:
    """Values for one row; a math template is drawn again until its numbers work out."""
    people = dict(zip("abc", rng.sample(words.PEOPLE[template["language"]], 3), strict=True))
    chosen = {name: deck.draw() for name, deck in decks.items() if name not in ("texts", "cases")}
    chosen |= decks["cases"].draw()
    for _ in range(MAX_DRAWS):
        drawn = {name: rng.choice(list(choices)) for name, choices in template.get("numbers", {}).items()}
        values = {name: exact(value) for name, value in (chosen | drawn).items()}
        if "derive" in template:
            values |= template["derive"](SimpleNamespace(**values))
        if _works_out(template, SimpleNamespace(**values)):
            return people | values | chosen | drawn
    raise ValueError(f"template {template['name']}: no clean numbers in {MAX_DRAWS} draws; widen its ranges")


def _works_out(template: dict[str, Any], values: SimpleNamespace) -> bool:
    if "where" in template and not template["where"](values):
        return False
    return "answer" not in template or is_clean(template["answer"](values), template.get("clean", "whole"))


def expand(template: dict[str, Any], count: int, rng: random.Random) -> Iterator[list[str]]:
    """`count` different rows of one template, each a list of user turns."""
    decks = {name: Deck(rng, choices) for name, choices in template.get("slots", {}).items()}
    decks |= {"texts": Deck(rng, template["texts"]), "cases": Deck(rng, template.get("cases", [{}]))}
    endings = Deck(rng, MATH_ENDINGS[template["language"]])
    seen: set[tuple[str, ...]] = set()
    for _ in range(MAX_DRAWS):
        if len(seen) == count:
            return
        text = decks["texts"].draw()
        turns = text if isinstance(text, list) else [text]
        values = {name: display(value) for name, value in draw_values(template, decks, rng).items()}
        turns = [turn.format(**values).strip() for turn in turns]
        if tuple(turns) in seen:
            continue
        seen.add(tuple(turns))
        if template["domain"] == "math":
            turns[-1] += endings.draw()
        yield turns
    raise ValueError(f"template {template['name']}: fewer than {count} different rows; add wordings or values")


def build_split(
    templates: list[dict[str, Any]], split: str, rng: random.Random, used_ids: Counter[str]
) -> list[dict[str, Any]]:
    """The shuffled rows of one split; a domain's rows are spread evenly over its templates.

    Rows left over by the division go to templates with several cases before those with one.
    """
    rows = []
    for domain, total in ROWS[split].items():
        used = [t for t in templates if t["domain"] == domain and t["heldout"] == (split == "heldout")]
        shuffled = sorted(rng.sample(used, len(used)), key=lambda template: len(template.get("cases", ())) == 1)
        extra = {template["name"] for template in shuffled[: total % len(used)]}
        for template in used:
            prefix = f"{domain}-{template['family']}"
            for turns in expand(template, total // len(used) + (template["name"] in extra), rng):
                used_ids[prefix] += 1
                messages = [{"role": "user", "content": turn} for turn in turns]
                identity = {"id": f"{prefix}-{used_ids[prefix]:04d}", "domain": domain, "template": template["name"]}
                rows.append({**identity, "messages": messages})
    rng.shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the two files (default: prompts/)")
    output = parser.parse_args().output
    templates, rng = load_templates(), random.Random(SEED)
    used_ids: Counter[str] = Counter()
    for split in ROWS:
        rows = build_split(templates, split, rng, used_ids)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (output / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
