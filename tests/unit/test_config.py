"""Configs are strict, frozen, and say in one line what is wrong."""

from pathlib import Path
from typing import Literal

import pydantic
import pytest

from dspark.config import Config, build_config, config_problems, load_config


class Source(Config):
    path: str = "prompts.jsonl"
    limit: int | None = None


class Job(Config):
    seed: int = 0
    learning_rate: float = pydantic.Field(1e-3, gt=0)
    sources: list[Source] = []
    fallback: Source | None = None
    options: dict[str, int] = {}

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Job":
        if self.seed == 13:
            raise ValueError("seed 13 is not offered with these sources; take 14")
        return self


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("seed: 3\nsources:\n  - path: a.jsonl\n  - path: b.jsonl\n")
    return path


def test_load_config_applies_overrides_over_the_file(config_file: Path) -> None:
    config = load_config(Job, config_file, ["seed=7", "learning_rate=1e-4", "fallback.path=c", "options.x=2"])
    assert (config.seed, config.learning_rate, config.options) == (7, 1e-4, {"x": 2})
    assert config.fallback == Source(path="c")


def test_an_override_reaches_into_a_list_by_index(config_file: Path) -> None:
    config = load_config(Job, config_file, ["sources.1.limit=5"])
    assert [source.limit for source in config.sources] == [None, 5]


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config(Job, tmp_path / "empty.yaml") == Job()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sed=7", "unknown key 'sed'; did you mean 'seed'"),
        ("sources.0.limt=7", "unknown key 'sources.0.limt'; did you mean 'limit'"),
        ("fallback.pth=x", "unknown key 'fallback.pth'; did you mean 'path'"),
        ("seed", "not of the form key.path=value"),
        ("=7", "not of the form key.path=value"),
        ("seed=[1", "not valid YAML"),
        ("seed.deeper=1", "'deeper' has no place"),
        ("sources.2.limit=1", "'2' is no index into a list of 2"),
        ("sources.x.limit=1", "'x' is no index into a list of 2"),
        ("seed=many", "seed = 'many': Input should be a valid integer"),
        ("learning_rate=0", "learning_rate = 0: Input should be greater than 0"),
        ("seed=13", "seed 13 is not offered"),
    ],
)
def test_a_wrong_override_is_refused_in_one_line(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(Job, config_file, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("- 1\n", "must hold a mapping"), ("a: [1\n", "not valid YAML"), ("seed: 1\nseed: 2\n", "'seed' stands twice")],
)
def test_a_file_that_is_no_plain_mapping_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "job.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_config(Job, tmp_path / "job.yaml")


def test_yaml_cannot_make_python_objects(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("seed: !!python/object/apply:os.getpid []\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_config(Job, tmp_path / "job.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config file not found: .*absent\.yaml"):
        load_config(Job, tmp_path / "absent.yaml")


def test_a_required_key_is_asked_for_by_name() -> None:
    class Needs(Config):
        output: str

    with pytest.raises(ValueError, match="output is required"):
        build_config(Needs, {})


def test_all_problems_of_a_config_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"seed = 'x'.*unknown key 'sorces'; did you mean 'sources'"):
        build_config(Job, {"seed": "x", "sorces": []})


def test_a_config_cannot_be_changed_in_place() -> None:
    with pytest.raises(pydantic.ValidationError):
        Job().seed = 1


def test_with_changes_leaves_unset_what_was_unset() -> None:
    """A drafter to go on from must agree with what a config says of its shape, not with defaults it never said."""
    changed = Job(seed=1).with_changes(learning_rate=0.5)
    assert changed.model_fields_set == {"seed", "learning_rate"}


def test_with_changes_validates_the_copy() -> None:
    assert Job().with_changes(seed=4).seed == 4
    with pytest.raises(pydantic.ValidationError):
        Job().with_changes(learning_rate=-1)


def test_problems_are_told_one_by_one_with_place_and_value() -> None:
    class Choice(Config):
        kind: Literal["red", "green"]
        jobs: list[Job] = []

    problems = config_problems(Choice, {"kind": "gren", "jobs": [{"sed": 1}, {"seed": 13}]})
    told = [(problem.name, problem.value, problem.message) for problem in problems]
    assert told[0][:2] == ("kind", "gren")
    assert told[0][2].endswith("; did you mean 'green'?")
    assert told[1] == ("jobs.0.sed", 1, "unknown key; did you mean 'seed'?")
    assert told[2][0] == "jobs.1"
    assert "seed 13 is not offered" in told[2][2]
    assert config_problems(Choice, {"kind": "red"}) == []
