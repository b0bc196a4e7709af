"""What README and docs/ say is there: links, commands with their configs and flags, settings, metrics."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from dspark.config import load_config
from dspark.serving.config import ServeConfig
from test_configs import CONFIG_OF, config_class

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = ("engine", "limits", "fleet", "failover", "routing", "scaling", "link")
MENTIONED_ONLY = {"cp", "sed", "curl", "export", "source", "mlflow", "pip", "git", "mkdir", "cat"}
JOB_FLAGS = {"--config", "--dry-run", "--fresh"}
MADE_BY_THE_READER = "mine"


def commands(page: Path) -> Iterator[str]:
    """Lines of the page's shell blocks, continued ones joined, comments taken off."""
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield shlex.join(words)


ALL_COMMANDS = [
    pytest.param(command, id=f"{page.name}: {command[:70]}")
    for page in PAGES
    if page.name != "kubernetes.md"  # tests/unit/manifests/test_docs.py
    for command in commands(page)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    readme = PAGES[0].read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in readme] == []


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_commands_are_as_the_programs_take_them(command: str) -> None:
    check(shlex.split(command))


def check(words: list[str]) -> None:
    """Raises: AssertionError or ValueError for what its program would refuse."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    program, *rest = words
    match Path(program).name:
        case "make":
            assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), rest
        case "python":
            check_script(Path(rest[0]), rest[1:])
        case "serve":
            assert rest[0] == "run", rest
            assert MADE_BY_THE_READER in rest[1] or (ROOT / rest[1]).is_file(), rest
        case "ray":
            assert rest[:2] == ["start", "--head"] or rest[:2] == ["job", "submit"] or rest == ["stop"], rest
            if "--" in rest:
                check(rest[rest.index("--") + 1 :])
        case "vllm":
            assert rest[0] == "serve"
        case name:
            assert name in MENTIONED_ONLY, f"{name}: a command that nobody checks"


def check_script(script: Path, arguments: list[str]) -> None:
    source = (ROOT / script).read_text(encoding="utf-8")
    if script.parent.name != "jobs":
        flags = [word for word in arguments if word.startswith("--")]
        assert [flag for flag in flags if f'"{flag}"' not in source and flag not in shared_flags()] == [], script
        return
    options = argparse.ArgumentParser()
    options.add_argument("--config", default=f"configs/demo/{script.stem}.yaml")
    given, overrides = options.parse_known_args(arguments)
    flags = [word for word in overrides if word.startswith("--")]
    keys = {flag: flag.removeprefix("--").replace("-", "_") for flag in flags}  # a job's own
    assert [flag for flag in flags if flag not in JOB_FLAGS and f'"{keys[flag]}"' not in source] == [], script
    if MADE_BY_THE_READER not in given.config:
        overrides = [word for word in overrides if "=" in word and not word.startswith("--")]
        load_config(config_class(script.stem), ROOT / given.config, overrides)


def shared_flags() -> str:
    return (ROOT / "benchmarks" / "served.py").read_text(encoding="utf-8")


def fields_of(model: type[pydantic.BaseModel]) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        nested = [part for part in (field.annotation, *getattr(field.annotation, "__args__", ())) if is_model(part)]
        yield name, nested[0] if nested else None


def is_model(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, pydantic.BaseModel)


def settings() -> set[str]:
    """`section.name` of everything a deployment may set, sections of sections too."""
    found: set[str] = set()
    open_sections = [(name, model) for name, model in fields_of(ServeConfig) if model]
    for section, model in open_sections:
        for name, nested in fields_of(model):
            found.add(f"{section}.{name}")
            if nested:
                open_sections.append((name, nested))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_are_named_exist(page: Path) -> None:
    known, text = settings(), page.read_text(encoding="utf-8")
    pattern = rf"`((?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_]+)?)"
    named = [".".join(name.split(".")[-2:]) for name in re.findall(pattern, text)]
    assert [name for name in named if name not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_are_named_are_exported(page: Path) -> None:
    sources = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "platform/dspark/serving").glob("*.py"))
    named = re.findall(r"\bdspark_([a-z_]+)\b(?!\.yaml)", page.read_text(encoding="utf-8"))
    bare = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in named}
    assert [name for name in sorted(bare) if not re.search(rf'"(dspark_)?{name}"', sources)] == []


@pytest.mark.parametrize(
    "command",
    [
        "make tset",
        "python jobs/trian.py",
        "python jobs/train.py stesp=3",
        "python jobs/train.py --fersh",
        "python benchmarks/soak.py --minuets 3",
        "serve run deployments/dsprak.yaml",
        "rm -rf /",
        "ray job submit -- python jobs/evaluate.py --config configs/tiny/evalute.yaml",
    ],
)
def test_what_a_program_would_refuse_is_found(command: str) -> None:
    with pytest.raises((AssertionError, ValueError, FileNotFoundError)):
        check(shlex.split(command))


def test_every_job_is_told_of() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    jobs = [path.stem for path in (ROOT / "jobs").glob("*.py") if path.stem in CONFIG_OF]
    assert [job for job in jobs if f"jobs/{job}.py" not in text] == []
