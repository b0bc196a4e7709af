"""The rules of the layout, each a checker that is itself tested on a small offender."""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "platform" / "dspark"
SCRIPTS = [ROOT / "jobs", ROOT / "deployments", ROOT / "prompts", ROOT / "benchmarks"]

LAYER_OF = {
    "config": 0, "errors": 0, "kernel_build": 0, "native": 0, "outbox": 0, "provenance": 0, "run_lifecycle": 0,
    "storage": 0, "run_contents": 0, "tracking": 0, "tracking_config": 0,
    "attention": 1, "bundled_target": 1, "chat": 1, "numerics": 1, "speculation": 1, "target_head": 1,
    "targets": 1, "transfer": 1,
    "drafters": 2,
    "engine": 3, "traffic": 3,
    "data": 4, "serving": 4,
    "evaluation": 5, "manifests": 5, "training": 5,
}  # fmt: skip

# Who may import what costs a framework; everybody else stays readable without knowing it. "jobs" are the scripts.
ALLOWED = {
    "deepspeed": {"training"},
    "fastapi": {"serving"},
    "mlflow": {"tracking"},
    "ray": {"data", "serving", "training", "jobs"},
    "torch.distributed": {"training"},
}
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60


def imported_names(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Dotted names a module imports anywhere: in functions, for type checking, relatively, by a literal name.

    `from a import b` gives both a and a.b, since b may be a module; `torch.x` in code counts as an import of it.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names.add(f"torch.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return names


def unit_of(module: str) -> str:
    """`dspark.data.chat` and `dspark.data` belong to `data`, `dspark.config` to `config`."""
    return module.split(".")[1]


def layer_offences(imports: Mapping[str, set[str]], layer_of: Mapping[str, int]) -> list[str]:
    """Imports that point upwards, or sideways into another package of the same layer."""
    packages = {unit_of(module) for module in imports if module.count(".") == 2}
    offences = [f"{unit_of(module)} has no layer" for module in imports if unit_of(module) not in layer_of]
    if offences:
        return sorted(set(offences))
    for module, name in internal_imports(imports):
        source, target = unit_of(module), unit_of(name)
        same_package = source == target or not {source, target} & packages
        if layer_of[target] > layer_of[source] or (layer_of[target] == layer_of[source] and not same_package):
            offences.append(f"{module} imports {name}")
    return sorted(offences)


def internal_imports(imports: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Pairs of modules of which the first imports the second."""
    for module, names in imports.items():
        for name in names & imports.keys() - {module}:
            # `from dspark.data import chat` is an import of chat; the package itself holds nothing but a docstring
            if not any(other.startswith(f"{name}.") for other in names & imports.keys()):
                yield module, name


def import_rings(imports: Mapping[str, set[str]]) -> list[str]:
    """Chains of imports that come back to where they began, each once."""
    edges: dict[str, list[str]] = {module: [] for module in imports}
    for module, name in internal_imports(imports):
        edges[module].append(name)
    rings: set[str] = set()
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            rings.add(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for name in edges[module]:
                visit(name, [*path, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return sorted(rings)


def confinement_offences(imports: Mapping[str, set[str]], allowed: Mapping[str, set[str]]) -> list[str]:
    """Modules that import a framework which is confined elsewhere. Scripts are named `jobs.<name>`."""
    offences = []
    for module, names in imports.items():
        unit = unit_of(module) if module.startswith("dspark.") else "jobs"
        for framework, units in allowed.items():
            if unit not in units and any(name == framework or name.startswith(f"{framework}.") for name in names):
                offences.append(f"{module} imports {framework}")
    return sorted(offences)


def size_offences(source: str, name: str) -> list[str]:
    """What is too long in a file."""
    num_lines = len(source.splitlines())
    offences = [f"{name} has {num_lines} lines"] if num_lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                offences.append(f"{name}: {node.name} has {length} lines")
    return offences


def is_docstring_only(source: str) -> bool:
    body = ast.parse(source).body
    return len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


def script_offences(names: list[str]) -> list[str]:
    """Script names that would hide a module, since the script's folder comes first on sys.path."""
    taken = sys.stdlib_module_names | {"dspark"} | {name.partition(".")[0] for name in ALLOWED} | {"transformers"}
    return sorted(name for name in names if name.removesuffix(".py") in taken)


def module_name(path: Path) -> str:
    return ".".join(("dspark", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def scripts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for folder in SCRIPTS for path in sorted(folder.glob("*.py"))}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return {
        module_name(path): imported_names(source, module_name(path), is_package=path.name == "__init__.py")
        for path, source in sources().items()
        if path != PACKAGE / "__init__.py"
    }


def test_the_package_is_found(imports: dict[str, set[str]]) -> None:
    assert {"dspark.config", "dspark.tracking", "dspark.drafters.base"} <= imports.keys()
    assert "dspark.errors" in imports["dspark.tracking"]


def test_imports_point_downwards(imports: dict[str, set[str]]) -> None:
    assert layer_offences(imports, LAYER_OF) == []


def test_no_imports_form_a_ring(imports: dict[str, set[str]]) -> None:
    assert import_rings(imports) == []


def test_frameworks_stay_where_they_belong(imports: dict[str, set[str]]) -> None:
    in_scripts = {f"jobs.{path.stem}": imported_names(source, path.stem) for path, source in scripts().items()}
    assert confinement_offences(imports | in_scripts, ALLOWED) == []


def test_package_files_hold_a_docstring_only() -> None:
    exempt = PACKAGE / "drafters" / "__init__.py"  # the registry
    packages = {path: source for path, source in sources().items() if path.name == "__init__.py" and path != exempt}
    assert [str(path) for path, source in packages.items() if not is_docstring_only(source)] == []


def test_every_folder_is_a_package_and_none_is_deeper_than_one() -> None:
    folders = {path.parent for path in sources()} - {PACKAGE}
    assert {folder.parent for folder in folders} == {PACKAGE}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_standard_library_keeps_its_platform_module() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    import platform

    assert platform.system()


def test_no_script_hides_a_module() -> None:
    assert script_offences([path.name for path in scripts()]) == []


def test_files_and_functions_stay_short() -> None:
    every = sources() | scripts()
    assert [line for path, text in every.items() for line in size_offences(text, str(path.relative_to(ROOT)))] == []


# The checkers themselves, on offenders.


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import dspark.data.chat as c", "dspark.data.chat"),
        ("from dspark.data import chat", "dspark.data.chat"),
        ("from . import chat", "dspark.data.chat"),
        ("from .chat import render", "dspark.data.chat"),
        ("from ..engine.request import commit", "dspark.engine.request"),
        ("def f():\n    import ray.data", "ray.data"),
        ("if TYPE_CHECKING:\n    from ray import ObjectRef", "ray"),
        ("importlib.import_module('mlflow')", "mlflow"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed"),
    ],
)
def test_imported_names_finds_every_way_to_import(source: str, name: str) -> None:
    assert name in imported_names(source, "dspark.data.prompts")


def test_imported_names_resolves_relative_imports_of_a_package_file() -> None:
    assert "dspark.data.chat" in imported_names("from .chat import render", "dspark.data", is_package=True)


@pytest.mark.parametrize(
    ("module", "name", "allowed"),
    [
        ("dspark.drafters.base", "dspark.speculation.proposal", True),
        ("dspark.drafters.dspark", "dspark.drafters.base", True),
        ("dspark.config", "dspark.errors", True),
        ("dspark.config", "dspark.drafters.base", False),
        ("dspark.data.chat", "dspark.evaluation.report", False),
        ("dspark.training.loop", "dspark.evaluation.report", False),
        ("dspark.targets", "dspark.speculation.proposal", False),
    ],
)
def test_layer_offences_knows_up_down_and_sideways(module: str, name: str, allowed: bool) -> None:
    imports = {module: {name}, name: set(), "dspark.speculation.proposal": set()}
    assert layer_offences(imports, LAYER_OF) == ([] if allowed else [f"{module} imports {name}"])


def test_layer_offences_refuses_a_module_without_a_layer() -> None:
    assert layer_offences({"dspark.misc": set()}, LAYER_OF) == ["misc has no layer"]


def test_import_rings_finds_a_ring_behind_a_tail() -> None:
    imports = {"dspark.a": {"dspark.b"}, "dspark.b": {"dspark.c"}, "dspark.c": {"dspark.b"}, "dspark.d": {"dspark.c"}}
    assert import_rings(imports) == ["dspark.b -> dspark.c -> dspark.b"]
    assert import_rings({**imports, "dspark.c": set()}) == []


def test_confinement_offences_covers_modules_and_jobs() -> None:
    imports = {
        "dspark.data.chat": {"ray.data", "rayon"},
        "dspark.engine.engine": {"ray"},
        "jobs.train": {"ray", "mlflow"},
    }
    assert confinement_offences(imports, ALLOWED) == ["dspark.engine.engine imports ray", "jobs.train imports mlflow"]


def test_size_offences_counts_lines_of_files_and_of_nested_functions() -> None:
    body = "\n".join(f"        x = {i}" for i in range(MAX_FUNCTION_LINES))
    assert size_offences(f"class A:\n    def f(self):\n{body}\n", "a.py") == ["a.py: f has 61 lines"]
    assert size_offences("x = 1\n" * 301, "b.py") == ["b.py has 301 lines"]


def test_is_docstring_only_refuses_an_import_after_the_docstring() -> None:
    assert is_docstring_only('"""What it holds."""\n')
    assert not is_docstring_only('"""What it holds."""\nfrom dspark import config\n')
    assert not is_docstring_only("")


def test_script_offences_knows_the_standard_library() -> None:
    assert script_offences(["train.py", "profile.py", "queue.py", "dspark.py", "ray.py"]) == [
        "dspark.py", "profile.py", "queue.py", "ray.py",
    ]  # fmt: skip
