"""Which prompts are measured in which mode, and which earlier results still count."""

from pathlib import Path

import pytest

from dspark.chat import ChatConfig
from dspark.config import build_config
from dspark.data.prompts import Prompt, PromptSet, RejectedRow
from dspark.engine.drafter_folder import CALIBRATION, COST_CURVE
from dspark.errors import Mismatch, MissingInput
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.planning import open_subject, plan_work, request_of, select_prompts, split_done
from dspark.provenance import fingerprint
from tiny_drafter import make_tiny_drafter
from tiny_target import make_tiny_target


def prompt(number: int, domain: str = "math", split: str = "heldout") -> Prompt:
    return Prompt(f"{domain}-{number}", domain, split, [{"role": "user", "content": f"question {number}"}])


def config_for(drafter: Path | str = "d", **changes) -> EvaluateConfig:
    content = {"drafter": str(drafter), "output": "o", "prompts": [{"path": "p.jsonl"}]}
    return build_config(EvaluateConfig, content | changes)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory, tiny_target) -> Path:
    chat = ChatConfig(system_prompt="Be brief.")
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target, chat=chat)


def row_for(item, **changes) -> dict:
    turn = {"comparison": {"identical": True} if item.compare else None, "plain": {} if item.time_plain else None}
    return {
        "id": item.prompt.id,
        "domain": item.prompt.domain,
        "prompt": fingerprint(item.prompt.messages),
        "mode": item.mode.name,
        "request": item.request,
        "error": None,
        "turns": [turn],
    } | changes


def test_only_held_out_prompts_are_measured_and_every_row_is_accounted_for():
    prompts = [prompt(n) for n in range(5)] + [prompt(n, split="train") for n in range(5, 8)]
    prompt_set = PromptSet(prompts, [RejectedRow("x:1", None, "not a JSON object")], num_over_limit=2)
    selected, left_out = select_prompts(prompt_set, config_for(prompts_per_domain=4))
    assert len(selected) == 4
    assert left_out == {"not a JSON object": 1, "over limit": 2, "train split": 3, "over prompts_per_domain": 1}
    assert prompt_set.num_read == len(selected) + sum(left_out.values())


def test_the_sample_of_a_domain_grows_with_its_size_and_keeps_what_it_had():
    prompt_set = PromptSet([prompt(n) for n in range(20)])
    few, more = (select_prompts(prompt_set, config_for(prompts_per_domain=n))[0] for n in (5, 9))
    assert {p.id for p in few} < {p.id for p in more}


def test_no_held_out_prompt_is_an_error():
    with pytest.raises(ValueError, match="held out"):
        select_prompts(PromptSet([prompt(1, split="train")]), config_for())


def test_the_target_and_the_chat_settings_are_those_the_drafter_was_trained_with(drafter, tiny_target):
    subject = open_subject(config_for(drafter))
    assert subject.target.name == str(tiny_target)
    assert subject.chat.system_prompt == "Be brief."


def test_another_target_than_the_drafters_is_refused_by_field(drafter, tmp_path):
    other = make_tiny_target(tmp_path, hidden=32)
    with pytest.raises(Mismatch, match="config_sha256"):
        open_subject(config_for(drafter, target={"name": str(other), "dtype": "float32"}))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "provenance.json"])
def test_an_incomplete_drafter_folder_names_the_job_that_makes_it(tmp_path, name):
    for other in {"config.json", "model.safetensors", "provenance.json"} - {name}:
        (tmp_path / other).write_text("{}")
    with pytest.raises(MissingInput, match=rf"{name} is missing.*jobs/train\.py"):
        open_subject(config_for(tmp_path))


def test_every_prompt_is_planned_in_every_mode_and_extras_go_to_the_first_of_each_domain(drafter):
    config = config_for(drafter, through="reference", compare_with_generate=3, time_plain=1)
    prompts = [prompt(n, domain) for domain in ("chat", "math") for n in range(3)]
    items = plan_work(config, open_subject(config), prompts)
    assert len(items) == 12
    compared = [(i.prompt.id, i.mode.name) for i in items if i.compare]
    assert compared == [("chat-0", "greedy"), ("chat-1", "greedy"), ("math-0", "greedy")]
    assert [i.prompt.id for i in items if i.time_plain] == ["chat-0", "math-0"] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 7},
        {"verify_length": 2},
        {"seed": 5},
        {"modes": [{"name": "greedy", "temperature": 0.5}]},
        {"through": "reference"},
        {"engine": {"kv_tokens": 64}},
    ],
)
def test_a_changed_setting_makes_earlier_results_stale(drafter, change):
    before, after = config_for(drafter), config_for(drafter, **change)
    subject = open_subject(before)
    assert request_of(before, subject, before.modes[0]) != request_of(after, subject, after.modes[0])


@pytest.mark.parametrize("name", [CALIBRATION, COST_CURVE])
def test_scheduled_results_are_stale_when_what_the_scheduler_goes_by_has_changed(tmp_path, tiny_target, name):
    folder = make_tiny_drafter(tmp_path, tiny_target)
    (folder / COST_CURVE).write_text("[]")
    fixed, scheduled = config_for(folder), config_for(folder, lengths="scheduled")
    subject = open_subject(scheduled)
    before = [request_of(config, subject, config.modes[0]) for config in (fixed, scheduled)]
    (folder / name).write_text("[1]")
    after = [request_of(config, subject, config.modes[0]) for config in (fixed, scheduled)]
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_scheduled_lengths_without_a_cost_curve_name_the_job_that_makes_it(drafter):
    with pytest.raises(MissingInput, match=r"cost_curve\.json.*jobs/profile_engine\.py"):
        open_subject(config_for(drafter, lengths="scheduled"))


def test_every_turn_of_every_item_has_its_own_seed(drafter):
    config = config_for(drafter)
    items = plan_work(config, open_subject(config), [prompt(n) for n in range(3)])
    seeds = {item.seed(seed, turn) for item in items for seed in (0, 1) for turn in (0, 1)}
    assert len(seeds) == len(items) * 4


def test_finished_items_are_not_measured_again(drafter):
    config = config_for(drafter)
    items = plan_work(config, open_subject(config), [prompt(n) for n in range(3)])
    done, to_do = split_done(items, [row_for(item) for item in items[:2]])
    assert [row["id"] for row in done] == ["math-0", "math-1"]
    assert to_do == items[2:]


@pytest.mark.parametrize(
    "change", [{"request": "other"}, {"prompt": "other text"}, {"domain": "chat"}, {"mode": "beam"}]
)
def test_a_result_of_something_else_does_not_count(drafter, change):
    config = config_for(drafter)
    items = plan_work(config, open_subject(config), [prompt(1)])
    done, to_do = split_done(items, [row_for(items[0], **change)])
    assert (done, to_do) == ([], items)


@pytest.mark.parametrize("extra", [{"compare_with_generate": 1}, {"time_plain": 1}])
def test_a_result_without_a_wanted_extra_is_measured_again(drafter, extra):
    config = config_for(drafter, through="reference")
    extra = extra | {"through": "reference"}
    plain_items = plan_work(config, open_subject(config), [prompt(1)])
    wanted = plan_work(config_for(drafter, **extra), open_subject(config), [prompt(1)])
    _, to_do = split_done(wanted, [row_for(item) for item in plain_items])
    assert to_do == [item for item in wanted if item.compare or item.time_plain]


@pytest.mark.parametrize("name", ["ngram", "mtp"])
def test_drafters_without_a_folder_are_sent_to_the_jobs_that_take_them(name):
    with pytest.raises(MissingInput, match=rf"drafter '{name}' has no folder, .* jobs/benchmark\.py"):
        open_subject(config_for(name))
